"""Whatever ends a save, a whole checkpoint is there: the old one or the new one, and nothing half done is seen."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.saved_values import on_ranks, part_of

import tapegrad as tg
from tapegrad import distributed as D
from tapegrad.errors import SaveError, SaveFileError

State = dict[str, bytes | None]
"""The files of a folder by path; None: a folder."""
X = np.arange(12, dtype="f4")


def state_of(folder: Path) -> State:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def restore(folder: Path, state: State) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, data in state.items():
        (folder / name).mkdir() if data is None else (folder / name).write_bytes(data)


class Disk:
    """Stands before each call that changes the disk, and before each half of what is written.

    ``states``: of the folder there, which is what a process that is killed there leaves.  The call number ``failing``
    finds a disk that is full.
    """

    def __init__(self, folder: Path, failing: int | None = None) -> None:
        self.folder, self.failing, self.states, self.lock = folder, failing, [], threading.Lock()

    def __enter__(self) -> Disk:
        self.patch = pytest.MonkeyPatch()
        for name in ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink"):
            self.patch.setattr(os, name, self.counted((lambda number: None) if name == "fsync" else getattr(os, name)))
        plain = builtins.open

        def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "x" not in mode:
                return plain(path, mode, *args, **options)
            return File(self.counted(plain)(path, mode, *args, **options), self)

        self.patch.setattr(builtins, "open", opened)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.patch.undo()
        self.states.append(state_of(self.folder))

    def counted(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self.lock:  # the state is that of one moment
                self.states.append(state_of(self.folder))
                if len(self.states) == self.failing:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return f(*args, **options)

        return call


class File:
    """A file of which a write may be done by half."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self.file, self.disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.file.close()

    def write(self, data: Any) -> None:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.disk.counted(self.file.write)(data[half:])


def save_folder(path: Path, value: int) -> None:
    """By two ranks, which are threads."""
    x = X * value
    tree = lambda rank: {"part": part_of(x, rank, 2), "whole": x, "value": value}
    errors = on_ranks(2, lambda group: D.save(path, tree(group.rank), overwrite=True, group=group))
    if errors != [None, None]:
        assert sum(": rank " in str(error) for error in errors) == 1  # of the other one
        assert {error.errno for error in errors} == {errno.ENOSPC}
        raise errors[1]


def load_folder(path: Path) -> int:
    loaded = D.load(path)
    assert np.array_equal(loaded["part"].numpy(), X * loaded["value"])
    assert np.array_equal(loaded["whole"].numpy(), X * loaded["value"])
    return loaded["value"]


def layer(value: int) -> Any:
    layer = tg.nn.Layer()
    layer.value, layer.whole = tg.Variable(value), tg.Variable(X * value)  # type: ignore[attr-defined]
    return layer


def save_file(path: Path, value: int) -> None:
    layer(value).save(path)


def load_file(path: Path) -> int:
    other = layer(0)
    other.load(path)
    value = int(other.value)
    assert np.array_equal(other.whole.numpy(), X * value)
    return value


def value_of(load: Callable[[Path], int], path: Path) -> int | None:
    """The value that was saved, all of it; None: there is nothing of that name."""
    try:
        return load(path)
    except FileNotFoundError as error:
        assert "there is no such f" in str(error), error
        return None


@pytest.fixture(params=["new", "over"])
def old(request: Any) -> int | None:
    """The value that is there before."""
    return 1 if request.param == "over" else None


@pytest.fixture(params=["file", "folder"])
def kind(request: Any) -> tuple[Callable[[Path, int], None], Callable[[Path], int]]:
    return (save_file, load_file) if request.param == "file" else (save_folder, load_folder)


@pytest.fixture
def path(tmp_path: Path, old: int | None, kind: Any) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    if old is not None:
        kind[0](folder / "s", old)
    return folder / "s"


def visible(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if not p.name.startswith(".")]


def killed(path: Path, save: Any, value: int) -> Iterator[State]:
    """The folder at each moment of a save, which is there when it is yielded."""
    with Disk(path.parent) as disk:
        save(path, value)
    for state in disk.states:
        restore(path.parent, state)
        yield state


def test_a_process_that_is_killed_leaves_the_old_one_or_the_new_one(path: Path, kind: Any, old: int | None) -> None:
    save, load = kind
    found = []
    for _ in killed(path, save, 2):
        found.append((value_of(load, path), visible(path.parent)))
        save(path, 3)  # over what is left
        assert load(path) == 3 and visible(path.parent) == ["s"]
        if save is save_folder:
            assert [p.name for p in path.parent.iterdir()] == ["s"]  # and that is gone
    values = [value for value, _ in found]
    assert values == sorted(values, key=lambda value: value == 2) and set(values) == {old, 2}
    unseen = [value for value, there in found if there != (["s"] if value else [])]
    # Between two renames only load sees the old folder.
    assert unseen == ([1] if old and save is save_folder else [])
    assert len(values) > (15 if save is save_folder else 4)


def test_a_second_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "s"
    path.parent.mkdir()
    save_folder(path, 1)
    seen, unseen = [], 0
    for state in list(killed(path, save_folder, 2)):
        kinds = sorted((name[:7], os.path.basename(name)[:5]) for name in state)  # whatever the numbers in the names
        if kinds in seen:
            continue
        seen.append(kinds)
        restore(path.parent, state)
        first = load_folder(path)
        unseen += not path.exists()
        values = [load_folder(path) for _ in killed(path, save_folder, 4)]
        assert set(values) == {first, 4} and values == sorted(values)
    assert len(seen) >= 6 and unseen == 1


def test_what_the_system_refuses_changes_nothing(path: Path, kind: Any, old: int | None) -> None:
    save, load = kind
    before = state_of(path.parent)
    for failing in range(1, 1000):
        restore(path.parent, before)
        try:
            with Disk(path.parent, failing):
                save(path, 2)
        except SaveError as error:
            assert isinstance(error, SaveFileError) and error.errno == errno.ENOSPC
            assert "No space left on device; free some space" in str(error)
            assert state_of(path.parent) == before
        else:
            assert load(path) == 2
            if [p.name for p in path.parent.iterdir()] == ["s"]:  # else an old folder could not be removed
                break
    assert failing > (12 if save is save_folder else 4)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the names of open files")
def test_all_is_on_the_disk_before_it_is_seen(path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[str, Any] = {}
    last: list[str] = []
    content = lambda p: sorted(os.listdir(p)) if os.path.isdir(p) else os.path.getsize(p)

    def sync(number: int) -> None:
        name = os.readlink(f"/proc/self/fd/{number}")
        synced[name] = content(name)

    def watched(rename: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(staged: str, target: str) -> None:
            if target == str(path):
                for p in (staged, *(str(p) for p in Path(staged).rglob("*"))):
                    assert synced[p] == content(p)
                last.append(staged)
            rename(staged, target)

        return call

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", watched(os.rename))
    monkeypatch.setattr(os, "replace", watched(os.replace))
    kind[0](path, 2)
    assert len(last) == 1
    if kind[0] is save_folder:  # its name, too
        assert "s" in synced[str(path.parent)]
