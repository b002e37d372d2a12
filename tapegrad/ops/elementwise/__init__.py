"""Operations that treat each element for itself."""
