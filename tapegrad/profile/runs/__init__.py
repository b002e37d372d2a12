"""Run files: what a profiled program did with memory, as it was recorded (:mod:`model`), on disk (:mod:`file`)."""

from tapegrad.profile.runs.file import RunFileError, load, save
from tapegrad.profile.runs.model import CATEGORIES, PHASES, Run

__all__ = ["CATEGORIES", "PHASES", "Run", "RunFileError", "load", "save"]
