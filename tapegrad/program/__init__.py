"""Captured steps: the works of one call of a function, planned ahead and replayed without deciding anything again."""
