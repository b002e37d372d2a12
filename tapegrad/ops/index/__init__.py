"""Operations that read and write elements by their places, and order them."""
