"""Budgets that are kept: which values are evicted, and how they are recomputed."""
