"""Operations that make arrays."""
