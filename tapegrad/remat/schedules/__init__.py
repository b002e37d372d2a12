"""Checkpointing schedules: which states of a loop or chain to keep, and what to run again.  Arithmetic only."""
