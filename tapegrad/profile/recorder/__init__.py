"""Recording a program: a :class:`Session` writes a journal, and makes a run of it."""

from tapegrad.profile.recorder.session import Session

__all__ = ["Session"]
