"""Cases for 4 ranks: saving by some of them, loading by others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from distributed.saved_values import Part, bits, part_of, train, training

import tapegrad as tg
from tapegrad import distributed as D
from tapegrad.errors import DistributedError


@contextmanager
def folder(group: D.Group) -> Iterator[Path]:
    """A folder of all ranks."""
    path = group.exchange_objects(tempfile.mkdtemp() if group.rank == 0 else None)[0]
    try:
        yield Path(path)
    finally:
        group.barrier()
        if group.rank == 0:
            shutil.rmtree(path)


def wholes() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "flat": rng.normal(size=1001), "half": rng.normal(size=(7, 5)).astype(tg.zeros((), dtype="bfloat16").dtype),
        "complex": np.asfortranarray(rng.normal(size=(3, 4)) * 1j), "few": np.arange(2), "none": np.zeros((0, 3), "f4"),
    }  # fmt: skip


def case_4_3_1_2(group: D.Group) -> None:
    """Slices of all ranks, of three, of one, of two: each group loads what the one before it has saved."""
    with folder(group) as path:
        before = 0
        for size in (4, 3, 1, 2):
            some = group.split(int(group.rank >= size))
            if group.rank < size:
                found = {
                    name: part_of(np.zeros_like(x) if before else x, some.rank, size) for name, x in wholes().items()
                }
                tree = {
                    "parts": found,
                    "whole": tg.Variable(np.zeros(3) if before else np.arange(3.0)),
                    "before": before,
                }
                if before:
                    assert D.load(path / str(before), tree, group=some)["whole"] is tree["whole"]
                for name, x in wholes().items():
                    part = found[name]
                    assert part.data.tobytes() == x.reshape(-1)[slice(*part.slice)].tobytes(), name
                assert np.array_equal(tree["whole"].numpy(), np.arange(3.0))
                D.save(path / str(size), tree, group=some)
            group.barrier()
            before = size
        for size in (4, 3, 1, 2):
            assert len(list((path / str(size)).glob("shard-*"))) == size
        alone = group.split(group.rank)
        loaded = D.load(path / "2", group=alone)
        for name, x in wholes().items():
            assert loaded["parts"][name].numpy().tobytes() == np.ascontiguousarray(x).tobytes()


def case_training_goes_on_with_fewer_ranks(group: D.Group) -> None:
    with folder(group) as path:
        tree = training(1, tg.optim.Adam)
        train(tree, 2)
        D.save(path / "s", tree)
        train(tree, 2)
        some = group.split(int(group.rank > 1))
        if group.rank <= 1:
            other = D.load(path / "s", training(2, tg.optim.Adam), group=some)
            train(other, 2)
            assert bits(other) == bits(tree)


def case_each_rank_has_its_own_stream(group: D.Group) -> None:
    with folder(group) as path:
        noise = tg.random.Generator(group.rank)
        noise.normal((5,))
        D.save(path / "s", {"noise": noise})
        wanted = noise.normal((3,)).numpy()
        other = tg.random.Generator(9)
        D.load(path / "s", {"noise": other})
        assert np.array_equal(other.normal((3,)).numpy(), wanted)


class Broken(Part):
    def local(self) -> Any:
        raise ZeroDivisionError("mine")


def case_an_exception_on_rank_1(group: D.Group) -> None:
    with folder(group) as path:
        D.save(path / "last", {"x": 1})
        kind = Broken if group.rank == 1 else Part
        try:
            D.save(path / "s", {"x": kind(np.ones(8), 2 * group.rank, 2 * group.rank + 2)})
        except (ZeroDivisionError, DistributedError) as error:
            assert str(error) == ("mine" if group.rank == 1 else "save: rank 1: mine (ZeroDivisionError)")
            group.barrier()
            assert os.listdir(path) == ["last"] and D.load(path / "last") == {"x": 1}
        else:
            raise AssertionError("it was saved")
