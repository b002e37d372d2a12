"""Where the program of a run lay, to name its files as a copy of it would."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tapegrad.remat.program_files import own_name
from tapegrad.tracing.run import Run


def relative_to_program(run: Run, file: str) -> str:
    """``file`` from the folder of the program of ``run`` on, or that tapegrad is in; "" if it is in neither."""
    if own := own_name(file):
        return own
    folder, file = folder_of(run), _slashed(file)
    return file[len(folder) + 1 :] if folder is not None and file.startswith(f"{folder}/") else ""


def folder_of(run: Run) -> str | None:
    """The folder of the program of ``run`` as it was there, or that its package is in; None if it cannot be told."""
    files = sorted({_slashed(run.text(file)) for file in (*run.frames["file"], *run.calls["file"])})
    module, argv = run.meta.get("module"), run.meta["argv"]
    if isinstance(module, str):
        package, path = module.partition(".")[0], module.replace(".", "/")
        return _before(files, [f"/{path}.py", f"/{path}/__main__.py"]) or _around(files, package)
    parts = [part for part in _slashed(argv[0] if argv else "").split("/") if part not in ("", ".", "..")]
    if not parts:
        return None
    program = "/".join(parts)
    outer = _before(files, [f"/{program}", f"/{program}/__main__.py"])
    if outer is not None:
        inside = f"{outer}/{program}"
        return inside if f"{inside}/__main__.py" in files else inside.rpartition("/")[0]
    return _slashed(os.path.dirname(os.path.abspath(argv[0]))) if os.path.isfile(argv[0]) else None


def _before(files: Iterable[str], ends: list[str]) -> str | None:
    return next((file.removesuffix(end) for file in files for end in ends if file.endswith(end)), None)


def _around(files: Iterable[str], package: str) -> str | None:
    parts = (file.rpartition(f"/{package}/") for file in files)
    return next((before for before, there, _ in parts if there), None)


def _slashed(file: str) -> str:
    return file.replace("\\", "/")
