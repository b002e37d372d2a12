"""Folders of ``distributed.save``: trees of any values, damage, and any number of ranks."""

from __future__ import annotations

import builtins
import gc
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed.saved_values import (
    Model,
    Part,
    ThreadGroup,
    X,
    all_well,
    bits,
    on_ranks,
    part_of,
    train,
    training,
)  # fmt: skip

import tapegrad as tg
from tapegrad import distributed as D
from tapegrad import nn, optim
from tapegrad.errors import DistributedError, SaveError, SaveFileError
from tapegrad.saving import files

BLOCK = 4 << 20
"""Bytes of one checksum."""


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def shard_name(rank: int, size: int) -> str:
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


# Trees ---------------------------------------------------------------------------------------------------------------


def test_a_tree_comes_back_as_if_training_had_not_stopped(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    D.save(tmp_path / "begin", tree)
    train(tree, 3)
    D.save(tmp_path / "s", tree)
    train(tree, 3)
    wanted = bits(tree)
    for steps in (0, 1):  # an optimizer without state, or with another one's
        other = training(2, optim.Adam)
        train(other, steps)
        loaded = D.load(tmp_path / "s", other)
        assert loaded["model"] is other["model"] and loaded["step"] == 3
        train(loaded, 3)
        assert bits(loaded) == wanted
    tree = D.load(tmp_path / "begin", tree)  # Adam's moments are zeros again
    assert tree["optimizer"].variables == [tree["optimizer"].iterations]
    train(tree, 6)
    assert bits(tree) == wanted


def test_averages_and_metrics_are_saved_as_their_variables(tmp_path: Path) -> None:
    def made(value: float, times: int) -> dict[str, Any]:
        v, mean = tg.Variable([value, 2.0]), tg.training.Mean()
        ema = optim.EMA([v], 0.5, debias=True)
        for i in range(times):
            v.assign_add([1.0, i])
            ema.update()
            mean.update_state(v)
        return {"v": v, "ema": ema, "mean": mean}

    tree, other = made(1.0, 3), made(5.0, 1)
    average, mean = tree["ema"].average(tree["v"]).numpy(), tree["mean"].result().numpy()
    D.save(tmp_path / "s", tree)
    loaded = D.load(tmp_path / "s", other)
    assert loaded["ema"] is other["ema"] and loaded["mean"] is other["mean"]
    np.testing.assert_array_equal(other["ema"].average(other["v"]).numpy(), average)
    assert other["mean"].result().numpy() == mean
    third = made(7.0, 1)
    D.load(tmp_path / "s", {**third, "ema": third["ema"].variables})  # a list of them has the same names
    np.testing.assert_array_equal(third["ema"].average(third["v"]).numpy(), average)


@pytest.mark.parametrize("dtype", ["bool", "int64", "bfloat16", "float32", ">f4", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_tensors_variables_and_arrays(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    x = np.arange(math.prod(shape)).reshape(shape).astype(tg.zeros((), dtype=dtype).dtype if dtype[0] != ">" else dtype)
    strided = np.repeat(x, 2).reshape(-1)[::2]
    tree = {"t": tg.asarray(x), "v": tg.Variable(x), "a": x, "f": x.copy(order="F"), "s": strided}
    D.save(tmp_path / "s", tree)
    zeros = np.zeros_like(x)
    other = {"t": tg.asarray(zeros), "v": tg.Variable(zeros), "a": zeros, "f": zeros, "s": zeros.reshape(-1)}
    loaded = D.load(tmp_path / "s", other)
    assert loaded["v"] is other["v"]
    assert [type(loaded[k]) for k in "tvaf"] == [tg.Tensor, tg.Variable, np.ndarray, np.ndarray]
    for found in (loaded, D.load(tmp_path / "s")):
        for key, value in tree.items():
            got, wanted = (np.asarray(y.numpy() if hasattr(y, "numpy") else y) for y in (found[key], value))
            assert got.shape == wanted.shape and got.dtype.name == wanted.dtype.name
            assert got.tobytes() == wanted.astype(got.dtype).tobytes()


def test_numbers_strings_and_streams_come_back(tmp_path: Path) -> None:
    values = [
        0, -1, 2**100, True, False, None, 0.1, -0.0, 5e-324, float("inf"), float("nan"), 1j, complex("-0-0j"),
        complex(float("nan"), float("-inf")), "", "ä\0\ud800/\"'", tg.random.Generator(2**127 + 1),
    ]  # fmt: skip
    values[-1].uniform((9,))  # type: ignore[attr-defined]
    D.save(tmp_path / "s", values)
    loaded = D.load(tmp_path / "s", [None] * (len(values) - 1) + [tg.random.Generator(0)])
    assert bits(loaded) == bits(values)
    assert [type(x) for x in loaded] == [type(x) for x in values]
    assert bits(list(D.load(tmp_path / "s").values())) == bits(values)
    json.loads((tmp_path / "s" / "index.json").read_text(), parse_constant=pytest.fail)  # no NaN: JSON has none


class Pair(NamedTuple):
    left: Any
    right: Any


def test_structures_and_names(tmp_path: Path) -> None:
    model = Model()
    model(X)
    tree = {
        "a": [tg.ones(2), (np.float32(3), {})],
        "p": Pair(model.head.kernel, model),
        7: {"x": 1},
        "wrapped": tg.recompute_grad(model),
    }
    D.save(tmp_path / "s", tree)
    body = index_of(tmp_path / "s")
    layer = [f"p/right/{n}" for n, _ in model.named_variables() if n != "head.kernel"]
    assert sorted(body["tensors"]) == sorted(["a/0", "a/1/0", "p/left", *layer])  # the kernel once, by its first name
    assert body["values"] == {"7/x": 1}
    loaded = D.load(tmp_path / "s", tree)
    assert type(loaded["p"]) is Pair and loaded["p"].right is model
    assert loaded["wrapped"] is tree["wrapped"] and type(loaded["a"][1][0]) is np.float32


@pytest.mark.parametrize("leaf", [tg.asarray([1.0, 2.0]), 5, None, tg.random.Generator(3)])
def test_a_tree_may_be_one_value(tmp_path: Path, leaf: Any) -> None:
    D.save(tmp_path / "s", leaf)
    assert bits(D.load(tmp_path / "s")) == bits(leaf)
    if leaf is not None:
        assert bits(D.load(tmp_path / "s", leaf)) == bits(leaf)


def test_others_can_map_the_files(tmp_path: Path) -> None:
    tree = {d: tg.ones((2, 3), dtype=d) for d in ("bool", "float16", "float32", "complex64", "complex128")}
    all_well(on_ranks(3, lambda group: D.save(tmp_path / "s", tree, group=group)))
    body = index_of(tmp_path / "s")
    assert body["metadata"]["total_size"] == sum(x.dtype.itemsize * 6 for x in tree.values())
    safetensors = pytest.importorskip("safetensors.numpy")
    for name, entry in body["tensors"].items():
        assert entry["pieces"][0]["offset"] % min(8, tree[name].dtype.itemsize) == 0
        x = safetensors.load_file(tmp_path / "s" / body["weight_map"][name])[name]
        assert x.tobytes() == tree[name].numpy().tobytes()


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"f": print}, "f: cannot save a builtin_function_or_method; a tree holds"),
        ({"t": tg.GradientTape()}, "t: cannot save a GradientTape; a tree holds layers, optimizers, optim.EMA"),
        ({"x": np.array(["a"])}, "x: safetensors cannot hold str"),
        ({1: 2, "1": 3}, "two values of the tree have the name '1'"),
        ({"a": 1, "a/b": 2}, "a value 'a' and one in it, 'a/b'"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, tree: Any, says: str) -> None:
    with pytest.raises(SaveError, match=says):
        D.save(tmp_path / "s", tree)
    assert visible(tmp_path) == []


def test_a_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    D.save(tmp_path / "s", {"x": 1})
    with pytest.raises(FileExistsError, match="s exists; give another path, or overwrite=True") as caught:
        D.save(tmp_path / "s", {"x": 2})
    assert isinstance(caught.value, SaveError) and D.load(tmp_path / "s") == {"x": 1}
    D.save(tmp_path / "s", {"x": 2}, overwrite=True)
    assert D.load(tmp_path / "s") == {"x": 2}
    (tmp_path / "s" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="holds notes.txt, which would be lost"):
        D.save(tmp_path / "s", {"x": 3}, overwrite=True)
    (tmp_path / "other").mkdir()
    D.save(tmp_path / "other", {"x": 3})  # it was empty
    (tmp_path / "full" / "thing").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(OSError, match=f"{name} is not a folder that save wrote"):
            D.save(tmp_path / name, {"x": 3}, overwrite=True)
    assert visible(tmp_path) == ["file", "full", "other", "s"]


# What cannot be loaded -----------------------------------------------------------------------------------------------


def test_kinds_must_be_the_same(tmp_path: Path) -> None:
    D.save(tmp_path / "s", {"x": tg.ones(2), "n": 1, "g": tg.random.Generator(1)})
    same = {"x": tg.ones(2), "n": 1, "g": tg.random.Generator(1)}
    for change, says in (
        ({"x": 1}, "x: wanted a value without shape, the folder has an array"),
        ({"n": tg.ones(2)}, "n: wanted an array, the folder has a value without shape"),
        ({"n": tg.random.Generator(1)}, "n: wanted a random stream, the folder has 1"),
        ({"g": 1}, "g: wanted a value, the folder has a random stream"),
    ):
        with pytest.raises(SaveError, match=says):
            D.load(tmp_path / "s", same | change)
    with pytest.raises(SaveError, match="does not fit the tree: it may be of another model; nothing was changed"):
        D.load(tmp_path / "s", {"model": same})


def test_strict_false_takes_what_is_common(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    D.save(tmp_path / "s", tree)
    other = {"model": training(2, optim.Adam)["model"], "more": tg.Variable(7.0), "count": 3}
    loaded = D.load(tmp_path / "s", other, strict=False)
    assert bits(loaded["model"]) == bits(tree["model"])
    assert float(other["more"]) == 7.0 and loaded["count"] == 3
    other["model"].head = nn.Dense(3)
    other["model"](X)
    with pytest.raises(SaveError, match="head.kernel: wanted shape"):
        D.load(tmp_path / "s", other, strict=False)


def body_of(**changes: Any) -> str:
    """An index as ``save`` writes it, with a right checksum, of one array of two elements."""
    from zlib import crc32

    piece = {"file": shard_name(0, 1), "offset": 8, "slice": [0, 2], "crc32": [0]}
    body = {
        "format": "tapegrad-checkpoint", "version": 1, "world_size": 1, "block_bytes": BLOCK,
        "files": {shard_name(0, 1): {"bytes": 16, "header_bytes": 8, "header_crc32": 0}},
        "tensors": {"x": {"shape": [2], "dtype": "float32", "pieces": [piece | changes.pop("piece", {})]}},
        "values": {},
    } | changes  # fmt: skip
    return json.dumps(body | {"crc32": crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is damaged"),
        ("[" * 100000, "is damaged"),
        ("[]", "is not the index of a folder that"),
        ('{"weight_map": {}}', "is not the index of a folder that"),
        ('{"format": "tapegrad-checkpoint", "version": 2}', "has version 2 of the format; .* reads version 1"),
        ('{"format": "tapegrad-checkpoint", "version": 1}', "is damaged"),
        (body_of(tensors=3), "is damaged"),
        (body_of(piece={"file": "../../secret"}), "is damaged"),
        (body_of(piece={"slice": [0, 1]}), "is damaged"),
        (body_of(piece={"slice": [1, 3]}), "is damaged"),
        (body_of(piece={"offset": 9}), "is damaged"),
        (body_of(piece={"crc32": []}), "is damaged"),
        (body_of(files={}), "is damaged"),
        (body_of(values={"n": {"ranks": []}}), "is damaged"),
        (body_of(tensors={"x": {"shape": [0], "dtype": "object", "pieces": []}}), "is damaged"),
        (body_of(block_bytes=0), "is damaged"),
        (body_of(values={"n": {"code": 1}}), "is no value that save writes"),
        (body_of(), "shard-00000-of-00001.safetensors: No such file"),
    ],
)
def test_an_index_of_others_is_data_that_may_be_wrong(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(
        FileNotFoundError, match="d has no index.json: it is not a folder that tg.distributed.save wrote"
    ):
        D.load(tmp_path / "d")
    (tmp_path / "d" / "index.json").write_text(text)
    with pytest.raises(SaveError, match=says):
        D.load(tmp_path / "d")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(SaveError, match="f is a file; what Layer.save has written, Layer.load reads"):
        D.load(tmp_path / "f")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of two ranks with several pieces and kinds of values."""
    return saved(tmp_path / "s", 0)


def saved(path: Path, plus: int) -> Path:
    def save(group: ThreadGroup) -> None:
        x = np.arange(10, dtype="f4") + plus
        tree = {"p": part_of(x, group.rank, group.size), "r": tg.asarray([True, False]), "z": 1j, "n": group.rank}
        D.save(path, tree, group=group)

    all_well(on_ranks(2, save))
    return path


def test_no_byte_can_change_unnoticed(small: Path) -> None:
    refused = 0
    for path in small.iterdir():
        whole = path.read_bytes()
        for i, change in zip(range(len(whole)), itertools.cycle((0x01, 0x20, 0x80))):
            damage(path, i, change)
            try:
                D.load(small)
            except SaveError as error:
                assert path.name in str(error)
                refused += 1
            else:  # what JSON means the same by
                assert path.name == "index.json", (path.name, i, change)
                assert json.loads(path.read_bytes()) == json.loads(whole), (i, change)
            damage(path, i, change)
    D.load(small)
    assert refused > 1000


def test_a_file_that_is_cut_off_longer_missing_or_of_another_save(small: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "t", 1)
    loaded = bits(D.load(small))
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        for broken in (whole[:0], whole[:-2], whole + b"x", None if path.name == "index.json" else b"other"):
            if broken is not None:
                path.write_bytes((other / path.name).read_bytes() if broken == b"other" else broken)
                with pytest.raises(SaveError, match=path.name):
                    D.load(small)
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            D.load(small)
        path.write_bytes(whole)
    assert bits(D.load(small)) == loaded


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    D.save(tmp_path / "s", tree)
    damage(tmp_path / "s" / shard_name(0, 1), -1)
    other = training(2, optim.Adam)
    before = bits(other)
    with pytest.raises(SaveError, match="is damaged: the bytes from .* are not those that were saved"):
        D.load(tmp_path / "s", other)
    assert bits(other) == before and other["step"] == 0


def damage(path: Path, at: int, change: int = 1) -> None:
    """Change a byte in its place: a file that is written anew waits for the disk."""
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ change]))


# Ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", range(24))
def test_any_slices_load_as_any_others(tmp_path: Path, trial: int) -> None:
    rng = np.random.default_rng(trial)
    shape = tuple(rng.integers(0 if trial % 5 == 0 else 1, 8, rng.integers(0, 4)))
    if trial % 8 == 7:
        shape = (3, BLOCK - 1)  # of several blocks
    dtype = "i1" if trial % 8 == 7 else rng.choice(["i1", "f4", "c16"])
    whole = (np.arange(math.prod(shape)) % 101).astype(dtype).reshape(shape)

    def cuts(size: int) -> list[int]:
        return [0, *sorted(rng.integers(0, whole.size + 1, size - 1).tolist()), whole.size]

    n, m = rng.integers(1, 5, 2).tolist()
    at, to = cuts(n), cuts(m)

    def save(group: Any) -> None:
        D.save(tmp_path / "s", {"a": Part(whole, at[group.rank], at[group.rank + 1]), "b": whole}, group=group)

    def load(group: Any) -> None:
        part = Part(whole * 0, to[group.rank], to[group.rank + 1])
        loaded = D.load(tmp_path / "s", {"a": part, "b": whole * 0}, group=group)
        assert part.data.tobytes() == whole.reshape(-1)[slice(*part.slice)].tobytes()
        assert loaded["b"].tobytes() == whole.tobytes() and loaded["b"].shape == whole.shape

    all_well(on_ranks(n, save))
    all_well(on_ranks(m, load))
    body = index_of(tmp_path / "s")
    assert ("weight_map" in body) == all(len(t["pieces"]) == 1 for t in body["tensors"].values())
    assert D.load(tmp_path / "s")["a"].numpy().tobytes() == whole.tobytes()


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    whole = np.zeros(6 * BLOCK, "u1")
    whole[::1000] = 7
    all_well(on_ranks(2, lambda g: D.save(tmp_path / "s", {"x": part_of(whole, g.rank, 2)}, group=g)))
    damage(tmp_path / "s" / shard_name(0, 2), -1)  # in the third of its three blocks
    (tmp_path / "s" / shard_name(1, 2)).unlink()

    def load(start: int, stop: int) -> bool:
        part = Part(whole * 0, start, stop)
        D.load(tmp_path / "s", {"x": part})
        return np.array_equal(part.data, whole[start:stop])

    assert load(BLOCK - 5, 2 * BLOCK)
    with pytest.raises(SaveError, match="x is damaged"):
        load(BLOCK - 5, 2 * BLOCK + 1)
    with pytest.raises(FileNotFoundError):
        load(3 * BLOCK, 3 * BLOCK + 1)


def test_what_several_ranks_have_is_written_once_and_spread(tmp_path: Path) -> None:
    tree = {f"x{i}": np.full(100 * (i + 1), i, "f4") for i in range(12)}
    all_well(on_ranks(4, lambda group: D.save(tmp_path / "s", tree, group=group)))
    sizes = [(tmp_path / "s" / shard_name(rank, 4)).stat().st_size for rank in range(4)]
    total = sum(x.nbytes for x in tree.values())
    assert total <= sum(sizes) < total + 4 * 1000
    assert max(sizes) < 1.2 * total / 4
    assert all(len(t["pieces"]) == 1 for t in index_of(tmp_path / "s")["tensors"].values())
    for size in (1, 3):
        for loaded in all_well(on_ranks(size, lambda group: D.load(tmp_path / "s", tree, group=group))):
            assert bits(loaded) == bits(tree)
    whole = np.arange(8, dtype="f4")
    all_well(on_ranks(4, lambda g: D.save(tmp_path / "t", {"x": part_of(whole, g.rank // 2, 2)}, group=g)))
    assert len(index_of(tmp_path / "t")["tensors"]["x"]["pieces"]) == 2
    assert np.array_equal(D.load(tmp_path / "t")["x"].numpy(), whole)


def test_streams_and_numbers_of_each_rank(tmp_path: Path) -> None:
    def tree(group: Any) -> dict[str, Any]:
        return {"noise": tg.random.Generator(group.rank), "same": tg.random.Generator(5), "loss": 0.5 + group.rank}

    all_well(on_ranks(3, lambda group: D.save(tmp_path / "s", tree(group), group=group)))

    def load(group: Any, **options: Any) -> Any:
        found = {"noise": tg.random.Generator(99), "same": tg.random.Generator(99), "loss": 0}
        return bits(D.load(tmp_path / "s", found, group=group, **options)), bits(tree(group))

    for loaded, wanted in all_well(on_ranks(3, load)):
        assert loaded == wanted
    assert D.load(tmp_path / "s")["loss"] == [0.5, 1.5, 2.5]
    for error in on_ranks(2, load):
        assert isinstance(error, SaveError)
        says = "noise: each of the 3 ranks had its own value, and the number of ranks is 2 now; leave it out"
        assert says in str(error)
    for loaded, _ in all_well(on_ranks(2, lambda group: load(group, strict=False))):
        assert [name for name, *_ in loaded] == ["loss", "noise", "same"]
        assert loaded[0][1] == "0" and loaded[1][1] == (99, 0) and loaded[2][1] == (5, 0)


class Wrong(Part):
    """Has other elements than it says."""

    def local(self) -> Any:
        return self.data[1:]


class Broken(Part):
    def local(self) -> Any:
        raise ZeroDivisionError("mine")


def thirds(rank: int, kind: Any = Part) -> Part:
    return kind(np.ones(9), 3 * rank, 3 * rank + 3)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (lambda r: {"x": np.full(3, r)}, "x is not the same on ranks 0 and 1; make it so"),
        (lambda r: {"x": np.ones(3 + r)}, r"x is float64 \(3,\) on rank 0, float64 \(4,\) on rank 1"),
        (lambda r: {"x": np.ones(3, ["f4", "f8", "f4"][r])}, "x is float32 .* on rank 0, float64 .* on rank 1"),
        (lambda r: {"x": 1} | ({"y": 2} if r == 2 else {}), "rank 2 has the value 'y', rank 0 has not"),
        (lambda r: {"x": 1} | ({"y": tg.ones(2)} if r < 2 else {}), "rank 0 has the array 'y', rank 2 has not"),
        (lambda r: {"x": [1, tg.ones(2), 1][r]}, "rank 0 has the value 'x', rank 1 has not"),
        (lambda r: {"x": Part(np.ones(9), r * 3, r * 3 + 2)}, "x do not make up its 9 elements: 0:2, 3:5, 6:8"),
        (lambda r: {"x": Part(np.ones(9), 0, 5 + 2 * r)}, "x do not make up its 9 elements: 0:5, 0:7, 0:9"),
        (lambda r: {"x": Part(np.ones(9), 0, 0)}, "slices of x do not make up its 9 elements: none"),
        (lambda r: {"x": thirds(r, Wrong if r == 2 else Part)}, "a slice of 3 elements of float64 has 2 of float64"),
    ],
)
def test_ranks_whose_trees_do_not_go_together(tmp_path: Path, tree: Any, says: str) -> None:
    for error in on_ranks(3, lambda group: D.save(tmp_path / "s", tree(group.rank), group=group)):
        assert type(error) is SaveError and str(error).startswith(("save: ", "a slice of"))
        with pytest.raises(SaveError, match=says):
            raise error
    assert visible(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_nothing_is_left_when_any_rank_hears_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The first rank does not remove what others write to before they have heard of it."""
    remove, plain = shutil.rmtree, builtins.open

    def slow_remove(*args: Any, **options: Any) -> None:
        time.sleep(0.2)
        remove(*args, **options)

    def slow_open(path: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.2 * ("shard-00001" in str(path)))
        return plain(path, *args, **options)

    if failing == 0:
        monkeypatch.setattr(builtins, "open", slow_open)
    else:
        monkeypatch.setattr(shutil, "rmtree", slow_remove)

    def save(group: Any) -> list[str]:
        part = thirds(group.rank, Broken if group.rank == failing else Part)
        with pytest.raises(ZeroDivisionError if group.rank == failing else DistributedError) as caught:
            D.save(tmp_path / "s", {"x": part}, group=group)
        assert group.rank == failing or str(caught.value) == f"save: rank {failing}: mine (ZeroDivisionError)"
        return visible(tmp_path)

    assert on_ranks(3, save) == [[], [], []]


def test_an_error_keeps_nothing_alive(tmp_path: Path) -> None:
    part = Broken(np.ones(9), 0, 9)
    alive = weakref.ref(part)
    gc.disable()  # counting references is enough
    try:
        D.save(tmp_path / "s", {"x": part})
    except ZeroDivisionError:
        del part
        assert alive() is not None  # by the frames of the error
    finally:
        gc.enable()
    assert alive() is None


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(Part):
        def local(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        D.save(tmp_path / "s", {"x": Interrupted(np.ones(9), 0, 9)})
    assert visible(tmp_path) == []

    def exchange(x: object) -> list[Any]:
        if visible(tmp_path):  # while it waits for others
            raise KeyboardInterrupt
        return [x]

    group = ThreadGroup(0, 1, None, [])  # type: ignore[arg-type]
    group.exchange_objects = exchange  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt) as caught:
        D.save(tmp_path / "s", {"x": 1}, group=group)
    assert caught.traceback  # whatever holds the frames
    assert visible(tmp_path) == []


def test_a_file_missing_for_one_rank_is_an_error_on_all_and_changes_nothing(tmp_path: Path) -> None:
    whole = np.arange(8, dtype="f4")
    all_well(on_ranks(4, lambda g: D.save(tmp_path / "s", {"x": part_of(whole, g.rank, 4)}, group=g)))
    (tmp_path / "s" / shard_name(3, 4)).unlink()
    parts = [part_of(whole * 0, rank, 2) for rank in range(2)]
    errors = on_ranks(2, lambda g: D.load(tmp_path / "s", {"x": parts[g.rank]}, group=g))
    for error in errors:
        assert isinstance(error, FileNotFoundError) and "shard-00003-of-00004.safetensors" in str(error)
    assert not any(part.data.any() for part in parts)
    assert "rank 1: " in str(errors[0])


def test_nobody_waits_for_long_nor_works_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with more to write than others meets them after each round, and stops in the round in which one fails."""
    monkeypatch.setattr(files, "ROUND_BYTES", 4000)  # of a gigabyte: a test would last long
    calls: list[str] = []

    class Watched(Part):
        def local(self) -> Any:
            calls.append("local")
            return super().local()

    def met(group: Any) -> Callable[[object], list[Any]]:
        exchange = group.exchange_objects

        def call(x: object) -> list[Any]:
            calls.append("met")
            return exchange(x)

        return call

    def save(group: Any, name: str, kind: Any) -> None:
        if group.rank == 1:
            group.exchange_objects = met(group)
        x = np.arange(1000.0)
        cut = 990
        part = (lambda: Watched(x, 0, cut)) if group.rank == 0 else (lambda: kind(x, cut, 1000))
        D.save(tmp_path / name, {f"x{i}": part() for i in range(10)}, group=group)

    all_well(on_ranks(2, lambda group: save(group, "s", Part)))
    assert calls.count("local") == 10 and calls.count("met") > 8
    calls.clear()
    assert [type(e) for e in on_ranks(2, lambda group: save(group, "t", Broken))] == [
        DistributedError,
        ZeroDivisionError,
    ]
    assert calls.count("local") <= 2
    if sys.platform == "linux":  # the errors, which know all frames, keep no file open
        assert not any(".t.tmp-" in os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    calls.clear()

    def load(group: Any) -> None:
        group.exchange_objects = met(group)
        D.load(tmp_path / "s", {f"x{i}": np.zeros(1000) for i in range(10)}, group=group)

    all_well(on_ranks(1, load))
    assert len(calls) > 8


def test_a_value_that_cannot_be_set_is_an_error_on_all(tmp_path: Path) -> None:
    class Stubborn(Part):
        def assign(self, x: Any) -> None:
            raise MemoryError("full")

    whole = np.arange(8.0)
    D.save(tmp_path / "s", {"x": whole})
    kinds = [Part, Stubborn]
    errors = on_ranks(
        2, lambda g: D.load(tmp_path / "s", {"x": kinds[g.rank](whole, 4 * g.rank, 4 * g.rank + 4)}, group=g)
    )
    assert isinstance(errors[0], DistributedError) and str(errors[0]) == "load: rank 1: full (MemoryError)"
    assert isinstance(errors[1], MemoryError) and "some are new, some are not; load again" in errors[1].__notes__[0]


def test_files_of_ranks_that_rank_0_does_not_see(tmp_path: Path) -> None:
    def save(group: Any) -> None:
        exchange = group.exchange_objects

        def hidden(x: object) -> Any:
            told = exchange(x)
            for path in tmp_path.glob(".s.tmp-*/shard-00001*") if group.rank == 0 else ():
                path.unlink()
            return told

        group.exchange_objects = hidden
        D.save(tmp_path / "s", {f"x{i}": tg.ones(3) for i in range(4)}, group=group)

    for error in on_ranks(2, save):
        assert isinstance(error, SaveFileError) and "all ranks must save to one disk that they share" in str(error)
    assert visible(tmp_path) == []


def test_long_work_shows_a_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    x = np.zeros(4 * BLOCK, "u1")
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))  # a block a second
    D.save(tmp_path / "quiet", x)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    D.save(tmp_path / "s", x)
    shown = capsys.readouterr().err
    assert re.search(r"\rsave s: 4\.0+ MiB of 16\.0+ MiB\rsave s: 8\.0+ MiB of 16\.0+ MiB *\r", shown)
    assert re.search(r"\r +\r$", shown)
    D.load(tmp_path / "s")
    assert re.search(r"\rload s: 12\.0+ MiB of 16\.0+ MiB", capsys.readouterr().err)
