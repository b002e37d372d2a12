"""Budgets that are kept: what is dropped, and how it comes back."""
