"""Compiled kernels on disk: used again, and only if nobody else can have changed them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tapegrad.engine.cpu.native import objects

PRIVATE = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps such folders for their user by itself")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "native"
    monkeypatch.setenv("TAPEGRAD_NATIVE_CACHE", str(path))
    return path


def test_an_object_is_loaded_as_it_was_stored(kept: Path) -> None:
    assert objects.load("a") is None
    objects.store("a", b"code")
    assert objects.load("a") == b"code"
    assert (kept.stat().st_mode & 0o777, (kept / "a").stat().st_mode & 0o777) == (0o700, 0o600)


def test_parts_of_a_key_are_told_apart() -> None:
    assert len({objects.key("ab", "c"), objects.key("a", "bc"), objects.key("abc")}) == 3


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: x[:40], lambda x: b"", lambda x: x[:-1] + b"!"])
def test_a_damaged_file_is_no_object(kept: Path, damage: "type") -> None:
    objects.store("a", b"some code")
    (kept / "a").write_bytes(damage((kept / "a").read_bytes()))
    assert objects.load("a") is None


@PRIVATE
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(kept: Path, mode: int) -> None:
    objects.store("a", b"code")
    kept.chmod(mode)
    assert objects.load("a") is None and "others may write" in objects.folder()[1]
    objects.store("b", b"code")
    assert sorted(os.listdir(kept)) == ["a"]


@PRIVATE
def test_a_file_that_others_may_write_is_not_used(kept: Path) -> None:
    objects.store("a", b"code")
    (kept / "a").chmod(0o622)
    assert objects.load("a") is None


@PRIVATE
def test_a_link_is_no_folder(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept.symlink_to(tmp_path / "elsewhere")
    assert objects.folder() == (None, f"{kept} is no folder")


def test_it_can_be_switched_off(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEGRAD_NATIVE_CACHE", "0")
    objects.store("a", b"code")
    assert objects.load("a") is None and not kept.exists()


def test_what_cannot_be_written_is_compiled_each_time(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.write_text("a file")
    objects.store("a", b"code")
    assert objects.load("a") is None and objects.folder()[0] is None


SCRIPT = """
import numpy as np, tapegrad as tg
from tapegrad.engine.cpu.native import objects
loaded, load = [], objects.load
objects.load = lambda name: loaded.append(load(name)) or loaded[-1]
f = tg.function(lambda x: (x * 2 + 1) * (x - 3) / (x * x + 2))
for _ in range(3): y = f(tg.asarray(np.linspace(0, 1, 50)))
print(len(loaded), loaded.count(None), y.numpy().tobytes().hex()[:64])
"""


@pytest.mark.usefixtures("machine_code")
def test_the_next_process_compiles_nothing() -> None:
    def run() -> list[str]:
        return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split()

    count, compiled, bits = run()
    assert compiled == count == "2"  # the runner, and the kernels
    assert run() == [count, "0", bits]
