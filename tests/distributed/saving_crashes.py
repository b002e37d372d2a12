"""Saves that are killed, or that the system refuses, at each call that changes the disk.

``python saving_crashes.py FOLDER SCENARIO`` prints, one line of JSON each, what was there after a save on two ranks
(threads) had met its end at the k-th such call, for k = 1, 2, ... until a save lives through.  Each save runs in a
process forked for it.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from distributed.saved_values import on_ranks, part_of

from tapegrad import distributed as D
from tapegrad.distributed.saving import shards

KILLED = 9


class Fate:
    """Counts the calls that change the disk, and ends or fails the one with the number ``at``."""

    def __init__(self, at: int, kill: bool) -> None:
        self._at, self._kill, self._count, self._lock = at, kill, 0, threading.Lock()
        self.met = False

    def step(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == self._at:
                self.met = True
                if self._kill:
                    os._exit(KILLED)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self) -> None:
        for name in ("mkdir", "rename", "fsync", "rmdir", "unlink"):
            setattr(os, name, self._counted(getattr(os, name)))
        plain = builtins.open

        def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "x" not in mode:
                return plain(path, mode, *args, **options)
            self.step()
            return File(plain(path, mode, *args, **options), self)

        builtins.open = opened  # type: ignore[assignment]

    def _counted(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.step()
            return f(*args, **options)

        return counted


class File:
    """A file of which a write may be done by half."""

    def __init__(self, file: Any, fate: Fate) -> None:
        self._file, self._fate = file, fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._fate.step()
        self._file.write(data[half:])


def save(path: Path, value: int, overwrite: bool) -> list[Any]:
    x = np.full(12, value, "f4")
    tree = lambda rank: {"part": part_of(x, rank, 2), "whole": x, "value": value}
    return on_ranks(2, lambda group: D.save(path, tree(group.rank), overwrite=overwrite, group=group))


def loaded(path: Path) -> Any:
    """The value that a whole folder holds; None: there is none."""
    try:
        found = D.load(path)
    except FileNotFoundError as error:
        assert "there is no such folder" in str(error), error
        return None
    assert set(found["part"].numpy()) == set(found["whole"].numpy()) == {found["value"]}
    return found["value"]


def ended(folder: Path, path: Path, value: int, at: int, kill: bool, overwrite: bool) -> tuple[bool, list[str]]:
    """Whether a process that saves has met its fate; and what each rank was told."""
    told = folder.parent / "told"
    pid = os.fork()
    if pid == 0:
        fate = Fate(at, kill)
        fate.install()
        results = save(path, value, overwrite)
        with builtins.open(told, "w") as file:
            texts = ["" if r is None else f"{type(r).__name__} {getattr(r, 'errno', '')}" for r in results]
            json.dump([fate.met, texts], file)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED), status
    return json.loads(told.read_text()) if status == 0 else (True, [])


def scenario(folder: Path, name: str) -> None:
    """``new-kill``, ``new-fail``, ``over-kill``, ``over-fail``: a new folder, or one that was there, is saved."""
    kill, overwrite = name.endswith("kill"), name.startswith("over")
    target = folder / ("step-1" if overwrite else "step-2")
    known: list[Any] = []
    for at in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        assert save(folder / "step-1", 1, False) == [None, None]
        met, told = ended(folder, target, 2, at, kill, overwrite)
        found = {
            "met": met, "told": told, "visible": seen(folder, hidden=False), "all": seen(folder),
            "step-1": loaded(folder / "step-1"), "step-2": loaded(folder / "step-2"),
        }  # fmt: skip
        if overwrite and kill and (state := (kind(folder), found["step-1"])) not in known:
            known.append(state)
            found["again"] = again(folder, target)
        found["after"] = [save(target, 3, True) == [None, None], loaded(target), seen(folder)]
        print(json.dumps(found), flush=True)
        if not met:
            return


def again(folder: Path, target: Path) -> list[Any]:
    """What is loaded after a second save, of the value 4, was killed at each call."""
    found, kept = [], folder.parent / "kept"
    shutil.copytree(folder, kept)
    for at in range(1, 1000):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        met, _ = ended(folder, target, 4, at, True, True)
        found.append(loaded(target))
        if not met:
            break
        shutil.rmtree(target, ignore_errors=True)
        loaded(target)  # what was being removed is no folder
    shutil.rmtree(kept)
    return found


def kind(folder: Path) -> list[tuple[str, bool]]:
    """What a killed process has left, but for the numbers in names: which folders, and whether each has an index."""
    return sorted((p.name[:9], (p / "index.json").exists()) for p in folder.iterdir())


def seen(folder: Path, hidden: bool = True) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if hidden or not p.name.startswith("."))


if __name__ == "__main__":
    shards.BLOCK_BYTES = shards.ROUND_BYTES = 40
    scenario(Path(sys.argv[1]), sys.argv[2])
