"""Profiles of several ranks: their clocks compared, their runs gathered and merged into one."""
