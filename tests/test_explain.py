"""explain prints the program of the kernel that then runs: random regions, with costly values and results held."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from explain_programs import explained, grown, indented, leaves_of
from inside import is_lazy

import tapegrad as tg
from tapegrad.engine.cpu import tiles
from tapegrad.engine.cpu.tiles import Tiling
from tapegrad.engine.lowering import Application
from tapegrad.engine.task import Task
from tapegrad.tensor import materialize


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the programs that run on the CPU."""
    texts = list[str]()

    def note(kind: type[Task]) -> None:
        run = kind.run

        def noting(work: Any, outputs: list[Any], temporaries: list[Any]) -> list[Any]:
            texts.append(work.text())
            return run(work, outputs, temporaries)

        monkeypatch.setattr(kind, "run", noting)

    note(Tiling)
    note(Application)
    return texts


@pytest.mark.parametrize("seed", range(60))
def test_on_the_cpu(seed: int, programs: list[str]) -> None:
    random = Random(seed)
    y, held = grown(random, leaves_of(random, tg.asarray, (150, 300)))
    programs.clear()  # what is read by broadcasting has been stored
    told = explained(y)
    assert not programs
    y.numpy()
    assert len(programs) == 1 and told.endswith(indented(programs[0])), told
    assert not is_lazy(y) and f"{told.count('<- output')} outputs;" in told
    del held


def test_costly_values_that_are_held_are_outputs(programs: list[str]) -> None:
    x = tg.asarray(np.linspace(0.1, 1.0, 40000))
    costly = tg.special.erfc(x)
    product = costly * x  # held, and made from the costly value
    y = tg.tanh(costly) + 1
    told = explained(y)
    assert "erfc(x1)  <- output, kept on the way" in told and "2 outputs; reads 320" in told
    y.numpy()
    assert told.endswith(indented(programs[0])) and not is_lazy(costly)
    del costly, product
    again = explained(tg.tanh(tg.special.erfc(x)) + 1)
    assert "kept on the way" not in again and " 1 outputs;" in again


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Tiles of 1000 elements."""
    tiles.set_tile_size(1000)
    yield
    tiles.set_tile_size(tiles.TILE)


def test_tiles_are_those_that_run(programs: list[str], small_tiles: None) -> None:
    y = tg.sqrt(tg.asarray(np.ones((200, 300))) * 2)
    assert "60 tiles of at most 1000 elements, 1 row" in explained(y)
    y.numpy()
    assert programs[0].startswith("60 tiles of at most 1000 elements")


def test_several_tensors_in_one_kernel(programs: list[str]) -> None:
    x = tg.asarray(np.ones((200, 300)))
    y, z = x * 2, tg.sin(x)
    told = explained(y, z)
    materialize(y, z)
    assert told.endswith(indented(programs[0])) and len(programs) == 1 and told.count("<- output") == 2


def test_another_region_is_another_text(programs: list[str]) -> None:
    x = tg.asarray(np.ones((200, 300)))
    told = explained(tg.sin(x))
    tg.cos(x).numpy()
    assert not told.endswith(indented(programs[0]))


@pytest.mark.parametrize("shape", [(300, 200), (40, 30, 50), (7, 900, 10)])
def test_tiles_of_strided_arrays_are_those_that_cover_all(shape: tuple[int, ...], small_tiles: None) -> None:
    x = tg.asarray(np.ones(shape[::-1]))
    told = explained(tg.sqrt(tg.permute_dims(x, tuple(range(x.ndim))[::-1]) * 2))
    found = re.search(r"(\d+) tiles of at most (\d+) elements", told)
    assert found is not None
    count, most = map(int, found.groups())
    assert most <= 1000 and x.size <= count * most


def test_on_the_cpu_every_step_of_the_program_is_a_line() -> None:
    x = tg.asarray(np.ones((200, 300)))
    lines = [line.strip() for line in explained(tg.tanh(x * 2) + x).splitlines()]
    assert lines[-3:] == ["s0 = multiply(x0, x1)", "s0 = tanh(s0)", "y0 = add(s0, x0)"]
