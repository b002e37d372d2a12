"""Run files: what a profiled program did with memory, in memory (``run.py``) and on disk (``file.py``)."""
