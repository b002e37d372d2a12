"""Files as plans name them: absolute, and relative to the folder of the program, which a copy of it has too."""

from __future__ import annotations

import functools
import os
import sys

_PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@functools.lru_cache(maxsize=4096)
def full_name(file: str) -> str:
    """A file's name as it is compared: absolute, unless it is none (``<string>``)."""
    return file if file.startswith("<") else os.path.abspath(file)


def relative_name(file: str) -> str:
    """``file`` from the folder of the program that runs on, or that tapegrad is in; "" if it is in neither."""
    file = full_name(file)
    if _below(file, os.path.join(_PACKAGES, "tapegrad")):
        return _below(file, _PACKAGES)
    folder = program_folder()
    return "" if folder is None else _below(file, folder) or _below(file, os.path.realpath(folder))


def own_name(file: str) -> str:
    """``tapegrad/nn/layers/core.py`` for a file of that name in any copy of tapegrad; "" for others."""
    _, inside, rest = file.replace("\\", "/").rpartition("/tapegrad/")
    return f"tapegrad/{rest}" if inside and os.path.exists(os.path.join(_PACKAGES, "tapegrad", rest)) else ""


def program_folder() -> str | None:
    """The folder of the script that runs, or that the package of the module is in; None in an interactive session."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not isinstance(file, str):
        return None
    folder = os.path.dirname(os.path.abspath(file))
    for _ in range(spec.name.count(".") if spec is not None else 0):
        folder = os.path.dirname(folder)
    return folder


def _below(file: str, folder: str) -> str:
    folder = folder.rstrip(os.sep) + os.sep
    return file[len(folder) :].replace(os.sep, "/") if file.startswith(folder) else ""
