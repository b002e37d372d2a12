"""Operations that reduce many elements to fewer, and those that accumulate."""
