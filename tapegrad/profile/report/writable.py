"""Outputs are tried before the work whose results they are to hold."""

from __future__ import annotations

import os

import click

from tapegrad.profile.runs.whole import require_writable


def try_output(option: str, path: str | os.PathLike[str]) -> None:
    """Raises UsageError, which names option, path and cause, if ``path`` could not be written; nothing is changed."""
    problem = problem_of(option, path)
    if problem is not None:
        raise click.UsageError(problem)


def problem_of(option: str, path: str | os.PathLike[str]) -> str | None:
    """Why ``path`` could not be written, and what to do; None if it could."""
    try:
        require_writable(path)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        return f"{option} {os.fspath(path)}: the folder {folder} does not exist; make it first"
    except OSError as error:
        return f"{option} {os.fspath(path)} cannot be written: {error.strerror}; give another path"
    return None
