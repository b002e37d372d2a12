"""Captured steps: the tasks of one call of a function, planned ahead and replayed without deciding anything again."""
