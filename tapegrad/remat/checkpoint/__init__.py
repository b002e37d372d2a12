"""Checkpoints: functions and loops that run again when their gradient is asked for."""
