"""Rematerialization: budgets that are kept, and checkpoints that trade time for bytes."""
