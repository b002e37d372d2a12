"""Operations that read and write elements by their positions, and order them."""
