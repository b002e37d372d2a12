"""Outputs are tried before the work whose results they are to hold."""

from __future__ import annotations

import os

import click

from tapegrad.tracing.atomic import require_writable


def try_output(option: str, path: str | os.PathLike[str]) -> None:
    """Raises UsageError, which names option, path and cause, if ``path`` could not be written; nothing is changed."""
    try:
        require_writable(path)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        raise click.UsageError(
            f"{option} {os.fspath(path)}: the folder {folder} does not exist; make it first"
        ) from None
    except OSError as error:
        raise click.UsageError(
            f"{option} {os.fspath(path)} cannot be written: {error.strerror}; give another path"
        ) from None
