"""Checkpoints: what was saved comes back to the bit, on any number of ranks; what is damaged or of another model is
refused, and then nothing has changed.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed.saved_values import (
    FullDisk,
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
from tapegrad.distributed.saving import folder, index, progress, shards
from tapegrad.errors import DistributedError, SaveError, SaveFileError, TapegradError

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


# Round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [optim.SGD, lambda: optim.SGD(momentum=0.9), optim.Adam, optim.AdamW])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, make: Any) -> None:
    tree = training(1, make)
    train(tree, 3)
    D.save(tmp_path / "s", tree)
    assert visible(tmp_path) == ["s"]
    train(tree, 3)
    wanted = bits(tree)
    other = training(2, make)
    train(other, 1)
    assert bits(other) != wanted
    loaded = D.load(tmp_path / "s", other)
    assert loaded["model"] is other["model"] and loaded["step"] == 3
    train(loaded, 3)
    assert bits(loaded) == wanted


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


def test_an_optimizer_without_steps_gets_its_state(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 2)
    D.save(tmp_path / "s", tree)
    fresh = training(2, optim.Adam)
    assert bits(D.load(tmp_path / "s", fresh)) == bits(tree)


def test_state_that_was_not_there_yet_is_dropped(tmp_path: Path) -> None:
    """Back to the beginning: Adam's moments are zeros again."""
    tree = training(1, optim.Adam)
    D.save(tmp_path / "s", tree)
    train(tree, 2)
    wanted = bits(tree)
    tree = D.load(tmp_path / "s", tree)
    assert tree["optimizer"].variables == [tree["optimizer"].iterations]
    train(tree, 2)
    assert bits(tree) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    kind = tg.zeros((), dtype=dtype).dtype
    raw = np.random.default_rng(1).bytes(math.prod(shape) * kind.itemsize)
    x = (np.frombuffer(raw, "u1") & (1 if dtype == "bool" else 255)).view(kind).reshape(shape)
    strided = np.repeat(x, 2).reshape(-1)[::2]
    tree = {"t": tg.asarray(x), "v": tg.Variable(x), "a": x, "f": x.copy(order="F"), "s": strided}
    D.save(tmp_path / "s", tree)
    zeros = np.zeros_like(x)
    other = {"t": tg.asarray(zeros), "v": tg.Variable(zeros), "a": zeros, "f": zeros, "s": zeros.reshape(-1)}
    loaded = D.load(tmp_path / "s", other)
    assert bits(loaded) == bits(tree)
    assert [type(loaded[k]) for k in "tvaf"] == [tg.Tensor, tg.Variable, np.ndarray, np.ndarray]
    assert loaded["v"] is other["v"]
    assert bits(D.load(tmp_path / "s")) == [(name, d, s, b) for name, d, s, b in bits(tree)]


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
    v = model.head.kernel
    tree = {
        "a": [tg.ones(2), (np.float32(3), {})],
        "p": Pair(v, model),
        7: {"x": 1},
        "wrapped": tg.recompute_grad(model),
    }
    D.save(tmp_path / "s", tree)
    body = index_of(tmp_path / "s")
    layer = [f"p/right/{n}" for n, _ in nn.layers.layer.named_variables(model) if n != "head.kernel"]
    assert sorted(body["tensors"]) == sorted(
        ["a/0", "a/1/0", "p/left", *layer]
    )  # the kernel once, under its first name
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


def test_a_layer_alone_keeps_the_names_of_its_file(tmp_path: Path) -> None:
    model = Model()
    model(X)
    D.save(tmp_path / "s", model)
    model.save(tmp_path / "m")
    safetensors = pytest.importorskip("safetensors.numpy")
    one, other = (
        safetensors.load_file(tmp_path / "m"),
        safetensors.load_file(tmp_path / "s" / "shard-00000-of-00001.safetensors"),
    )
    assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in other.items()}


def test_arrays_of_other_byte_orders(tmp_path: Path) -> None:
    x = np.arange(5, dtype=">f4")
    D.save(tmp_path / "s", {"x": x})
    assert np.array_equal(D.load(tmp_path / "s")["x"].numpy(), x)
    assert np.array_equal(D.load(tmp_path / "s", {"x": np.zeros_like(x)})["x"], x)


def test_nothing_need_be_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(safetensors=None, mpi4py=None)\n"
        "import tapegrad as tg\n"
        f"tg.distributed.save({str(tmp_path / 's')!r}, tg.ones(3)); print(tg.distributed.load({str(tmp_path / 's')!r}))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert "[1. 1. 1.]" in done.stdout, done.stderr


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tree = {dtype: tg.asarray(np.arange(6).reshape(2, 3), dtype=dtype) for dtype in DTYPES}
    all_well(on_ranks(3, lambda group: D.save(tmp_path / "s", tree, group=group)))
    body = index_of(tmp_path / "s")
    assert body["metadata"]["total_size"] == sum(x.dtype.itemsize * 6 for x in tree.values())
    for name, entry in body["tensors"].items():  # so others can map the files
        assert entry["pieces"][0]["offset"] % min(8, tree[name].dtype.itemsize) == 0
    for name, file in body["weight_map"].items():
        x = safetensors.load_file(tmp_path / "s" / file)[name]
        if name.startswith("complex"):
            assert x.shape == (2, 3, 2)
            x = x[..., 0] + 1j * x[..., 1]
        assert x.shape == (2, 3) and str(x.dtype) == name
        assert x.tobytes() == tree[name].numpy().tobytes()


# What cannot be saved ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"f": print}, "f: cannot save a builtin_function_or_method; a tree holds"),
        (
            {"t": tg.GradientTape()},
            "t: cannot save a GradientTape; a tree holds layers, optimizers, optim.EMA",
        ),
        ({"x": np.ones(2, "longdouble")}, "x: safetensors cannot hold longdouble|x: safetensors cannot hold float128"),
        ({"x": np.array(["a"])}, "x: safetensors cannot hold str"),
        ({1: 2, "1": 3}, "two values of the tree have the name '1'"),
        ({"a": 1, "a/b": 2}, "a value 'a' and one in it, 'a/b'"),
        ({"d": nn.Dense(2, name="d")}, 'Dense "d" has no variables yet'),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, tree: Any, says: str) -> None:
    with pytest.raises(SaveError, match=says):
        D.save(tmp_path / "s", tree)
    assert visible(tmp_path) == []


def test_state_of_variables_that_are_not_there(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    with pytest.raises(SaveError, match="state variables for variables that are not in the tree"):
        D.save(tmp_path / "s", {"optimizer": tree["optimizer"]})


def test_a_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    D.save(tmp_path / "s", {"x": 1})
    with pytest.raises(FileExistsError, match="s exists; give another path, or overwrite=True") as caught:
        D.save(tmp_path / "s", {"x": 2})
    assert isinstance(caught.value, SaveError) and D.load(tmp_path / "s") == {"x": 1}
    D.save(tmp_path / "s", {"x": 2}, overwrite=True)
    assert D.load(tmp_path / "s") == {"x": 2}
    assert visible(tmp_path) == ["s"]
    (tmp_path / "s" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="holds notes.txt, which would be lost"):
        D.save(tmp_path / "s", {"x": 3}, overwrite=True)
    (tmp_path / "other").mkdir()
    D.save(tmp_path / "other", {"x": 3})  # it was empty
    for name in ("file", "full"):
        (tmp_path / name).mkdir() if name == "full" else (tmp_path / name).write_text("mine")
        (tmp_path / "full" / "thing").write_text("mine") if name == "full" else None
        with pytest.raises(OSError, match=f"{name} is not a folder that save wrote"):
            D.save(tmp_path / name, {"x": 3}, overwrite=True)
    assert visible(tmp_path) == ["file", "full", "other", "s"]


def test_what_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, says in (
        (tmp_path / "none" / "s", "make the folder .*none first"),
        (tmp_path / "file" / "s", "a part of the path is a file"),
        ("", "cannot be the name of a file"),
        ("s\0", "cannot be the name of a file"),
        (tmp_path / ("a" * 300), "give a shorter name"),
    ):
        with pytest.raises(SaveError, match=says):
            D.save(path, {"x": 1})
    assert visible(tmp_path) == ["file"]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    D.save(tmp_path / "real" / "s", {"x": 1})
    (tmp_path / "link").symlink_to(tmp_path / "real" / "s")
    D.save(tmp_path / "link", {"x": 2}, overwrite=True)
    assert (tmp_path / "link").is_symlink() and D.load(tmp_path / "real" / "s") == {"x": 2}
    assert visible(tmp_path / "real") == ["s"]


# What cannot be loaded -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    D.save(tmp_path / "s", tree)
    other = training(2, optim.Adam)
    other["model"].head = nn.Dense(3)
    other["model"](X)
    other["more"] = tg.Variable(1.0)
    other["step"] = tg.ones(2)
    before = bits(other)
    with pytest.raises(SaveError) as caught:
        D.load(tmp_path / "s", other)
    message = str(caught.value)
    for line in (
        "s does not fit the tree; nothing was changed:\n",
        "model/head.kernel: wanted shape (4, 3), the folder has (4, 2)",
        "more: missing in the folder",
        "step: wanted an array, the folder has a value without shape",
    ):
        assert line in message, message
    assert bits(other) == before and other["optimizer"].variables == [other["optimizer"].iterations]


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    D.save(tmp_path / "s", {"weights": {"a": tg.ones(2), "b": tg.ones(3), "c": 4}})
    with pytest.raises(SaveError, match="does not fit the tree: it may be of another model; nothing was changed"):
        D.load(tmp_path / "s", {"a": tg.ones(2), "b": tg.ones(3)})


def test_kinds_and_dtypes_must_be_the_same(tmp_path: Path) -> None:
    D.save(tmp_path / "s", {"x": tg.ones(2), "n": 1, "g": tg.random.Generator(1)})
    for tree, says in (
        (
            {"x": tg.ones(2, dtype="float64"), "n": 1, "g": tg.random.Generator(1)},
            "x: wanted dtype float64, the folder has",
        ),
        ({"x": 1, "n": 1, "g": tg.random.Generator(1)}, "x: wanted a value without shape, the folder has an array"),
        ({"x": tg.ones(2), "n": tg.random.Generator(1), "g": 1}, "n: wanted a random stream, the folder has 1"),
        ({"x": tg.ones(2), "n": 1, "g": 1}, "g: wanted a value, the folder has a random stream"),
        ({"x": tg.ones(2), "n": 1}, "g: in the folder only"),
    ):
        with pytest.raises(SaveError, match=says):
            D.load(tmp_path / "s", tree)


def test_an_optimizer_of_another_kind(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    D.save(tmp_path / "s", tree)
    with pytest.raises(SaveError, match="optimizer/class: wanted 'AdamW', the folder has 'Adam'"):
        D.load(tmp_path / "s", {**tree, "optimizer": optim.AdamW()})


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


def test_folders_that_are_missing_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="load: .*s: there is no such folder") as caught:
        D.load(tmp_path / "s")
    assert caught.value.errno == errno.ENOENT and isinstance(caught.value, TapegradError)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        D.load(tmp_path / "none" / "s")
    (tmp_path / "d").mkdir()
    with pytest.raises(
        FileNotFoundError, match="d has no index.json: it is not a folder that tg.distributed.save wrote"
    ):
        D.load(tmp_path / "d")
    (tmp_path / "f").write_text("")
    with pytest.raises(SaveError, match="f is a file; what Layer.save has written, Layer.load reads"):
        D.load(tmp_path / "f")
    for text, says in (
        ("", "is damaged"),
        ("[]", "is not the index of a folder that"),
        ('{"weight_map": {}}', "is not the index of a folder that"),
        (
            '{"format": "tapegrad-checkpoint", "version": 2}',
            "has version 2 of the format; this tapegrad reads version 1",
        ),
    ):
        (tmp_path / "d" / "index.json").write_text(text)
        with pytest.raises(SaveError, match=says):
            D.load(tmp_path / "d")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two ranks with several blocks, pieces and kinds of values."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 16)
    x = np.arange(10, dtype="f4")

    def save(group: ThreadGroup) -> None:
        tree = {"p": part_of(x, group.rank, group.size), "r": tg.asarray([True, False]), "z": 1j, "n": group.rank}
        D.save(tmp_path / "s", tree, group=group)

    all_well(on_ranks(2, save))
    return tmp_path / "s"


def test_no_byte_can_change_unnoticed(small: Path) -> None:
    D.load(small)
    refused = 0
    for path in small.iterdir():
        whole = path.read_bytes()
        for i, change in itertools.product(range(len(whole)), (0x01, 0x20, 0x80)):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ change]) + whole[i + 1 :])
            try:
                D.load(small)
            except SaveError as error:
                assert path.name in str(error)
                refused += 1
            else:  # what JSON means the same by
                assert path.name == "index.json", (path.name, i, change)
                assert json.loads(path.read_bytes()) == json.loads(whole), (i, change)
        path.write_bytes(whole)
    D.load(small)
    assert refused > 3000


def test_files_that_are_cut_off_longer_or_missing(small: Path) -> None:
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        lengths = range(len(whole)) if path.name != "index.json" else range(len(whole) - 1)  # its last line has an end
        for n in lengths:
            path.write_bytes(whole[:n])
            with pytest.raises(SaveError, match=path.name):
                D.load(small)
        path.write_bytes(whole + b"x")
        with pytest.raises(SaveError, match=path.name):
            D.load(small)
        path.unlink()
        with pytest.raises(FileNotFoundError, match=path.name):
            D.load(small)
        path.write_bytes(whole)
    D.load(small)


def test_files_of_another_save_are_refused(small: Path, tmp_path: Path) -> None:
    x = np.arange(10, dtype="f4") + 1

    def save(group: ThreadGroup) -> None:
        tree = {"p": part_of(x, group.rank, group.size), "r": tg.asarray([True, False]), "z": 1j, "n": group.rank}
        D.save(tmp_path / "t", tree, group=group)

    all_well(on_ranks(2, save))
    shutil.copy(tmp_path / "t" / index.shard_name(1, 2), small)
    with pytest.raises(SaveError, match="shard-00001-of-00002.safetensors: p is damaged: the bytes from"):
        D.load(small)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    tree = training(1, optim.Adam)
    train(tree, 1)
    D.save(tmp_path / "s", tree)
    path = tmp_path / "s" / index.shard_name(0, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other = training(2, optim.Adam)
    before = bits(other)
    with pytest.raises(SaveError, match="is damaged"):
        D.load(tmp_path / "s", other)
    assert bits(other) == before and other["step"] == 0


# Ranks ---------------------------------------------------------------------------------------------------------------


def test_any_slices_load_as_any_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    for trial in range(40):
        monkeypatch.setattr(shards, "BLOCK_BYTES", int(rng.choice([1, 3, 16, 1 << 20])))
        dtype = rng.choice(["i1", "f4", "c16"])
        shape = tuple(rng.integers(0 if trial % 5 == 0 else 1, 8, rng.integers(0, 4)))
        whole = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
        path = tmp_path / str(trial)

        def cuts(size: int, n: int = whole.size, rng: Any = rng) -> list[int]:
            return [0, *sorted(rng.integers(0, n + 1, size - 1).tolist()), n]

        n, m = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        at, to, names = cuts(n), cuts(m), ["a", "b"]

        def save(group: Any, at: Any = at, whole: Any = whole, path: Any = path) -> None:
            part = Part(whole, at[group.rank], at[group.rank + 1])
            D.save(path, {"a": part, "b": whole}, group=group)

        def load(group: Any, to: Any = to, whole: Any = whole, path: Any = path, names: Any = names) -> None:
            part = Part(whole * 0, to[group.rank], to[group.rank + 1])
            loaded = D.load(path, {"a": part, "b": whole * 0}, group=group)
            assert part.data.tobytes() == whole.reshape(-1)[slice(*part.slice)].tobytes()
            assert loaded["b"].tobytes() == whole.tobytes() and loaded["b"].shape == whole.shape

        all_well(on_ranks(n, save))
        all_well(on_ranks(m, load))
        assert ("weight_map" in index_of(path)) == all(
            len(t["pieces"]) == 1 for t in index_of(path)["tensors"].values()
        )
        assert D.load(path)["a"].numpy().tobytes() == whole.tobytes()


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", 64)
    whole = np.arange(1000, dtype="f4")
    all_well(on_ranks(4, lambda g: D.save(tmp_path / "s", {"x": part_of(whole, g.rank, 4), "y": whole}, group=g)))
    read: list[int] = []
    fill = shards._fill

    def counted(file: Any, into: Any, path: str) -> None:
        read.append(into.size)
        fill(file, into, path)

    monkeypatch.setattr(shards, "_fill", counted)
    part = Part(whole * 0, 240, 270)  # of two files
    D.load(tmp_path / "s", {"x": part}, strict=False)
    assert np.array_equal(part.data, whole[240:270])
    headers = sum(f["header_bytes"] for f in index_of(tmp_path / "s")["files"].values())
    assert sum(read) <= headers + 120 + 4 * 64


def test_what_all_have_is_written_once_and_spread(tmp_path: Path) -> None:
    tree = {f"x{i}": np.full(100 * (i + 1), i, "f4") for i in range(12)}
    all_well(on_ranks(4, lambda group: D.save(tmp_path / "s", tree, group=group)))
    sizes = [(tmp_path / "s" / index.shard_name(rank, 4)).stat().st_size for rank in range(4)]
    total = sum(x.nbytes for x in tree.values())
    assert total <= sum(sizes) < total + 4 * 1000
    assert max(sizes) < 1.2 * total / 4
    assert all(len(t["pieces"]) == 1 for t in index_of(tmp_path / "s")["tensors"].values())
    for size in (1, 3):
        for loaded in all_well(on_ranks(size, lambda group: D.load(tmp_path / "s", tree, group=group))):
            assert bits(loaded) == bits(tree)


def test_a_slice_that_two_ranks_have_is_written_once(tmp_path: Path) -> None:
    whole = np.arange(8, dtype="f4")
    all_well(on_ranks(4, lambda g: D.save(tmp_path / "s", {"x": part_of(whole, g.rank // 2, 2)}, group=g)))
    assert len(index_of(tmp_path / "s")["tensors"]["x"]["pieces"]) == 2
    assert np.array_equal(D.load(tmp_path / "s")["x"].numpy(), whole)


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
        assert "noise: each of the 3 ranks had its own value, and the number of ranks is 2 now; leave it out" in str(
            error
        )
    for loaded, _ in all_well(on_ranks(2, lambda group: load(group, strict=False))):
        assert [name for name, *_ in loaded] == ["loss", "noise", "same"]
        assert loaded[0][1] == "0" and loaded[1][1] == (99, 0) and loaded[2][1] == (5, 0)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (lambda r: {"x": np.full(3, r)}, "x is not the same on ranks 0 and 1; make it so"),
        (lambda r: {"x": np.ones(3 + r)}, r"x is float64 \(3,\) on rank 0, float64 \(4,\) on rank 1"),
        (lambda r: {"x": np.ones(3, ["f4", "f8", "f4"][r])}, "x is float32 .* on rank 0, float64 .* on rank 1"),
        (lambda r: {"x": 1, **({"y": 2} if r == 2 else {})}, "rank 2 has the value 'y', rank 0 has not"),
        (
            lambda r: {"x": tg.ones(2), **({"y": tg.ones(2)} if r < 2 else {})},
            "rank 0 has the array 'y', rank 2 has not",
        ),
        (
            lambda r: {"x": Part(np.ones(9), r * 3, r * 3 + 2)},
            "slices of x do not make up its 9 elements: 0:2, 3:5, 6:8",
        ),
        (lambda r: {"x": Part(np.ones(9), 0, 5 + 2 * r)}, "slices of x do not make up its 9 elements: 0:5, 0:7, 0:9"),
        (lambda r: {"x": Part(np.ones(9), 0, 0)}, "slices of x do not make up its 9 elements: none"),
    ],
)
def test_ranks_whose_trees_do_not_go_together(tmp_path: Path, tree: Any, says: str) -> None:
    errors = on_ranks(3, lambda group: D.save(tmp_path / "s", tree(group.rank), group=group))
    with pytest.raises(SaveError, match=says):
        raise errors[0]
    for error in errors[1:]:
        assert type(error) is SaveError and "save: rank 0: " in str(error)
    assert visible(tmp_path) == []


class Wrong(Part):
    def local(self) -> Any:
        return self.data[1:]


def test_a_rank_that_gives_other_elements_than_it_says(tmp_path: Path) -> None:
    def save(group: Any) -> None:
        kind = Wrong if group.rank == 2 else Part
        D.save(tmp_path / "s", {"x": kind(np.ones(9), 3 * group.rank, 3 * group.rank + 3)}, group=group)

    for error in on_ranks(3, save):
        assert isinstance(error, SaveError) and "a slice of 3 elements of float64 has 2 of float64" in str(error)
    assert visible(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [*(index.shard_name(rank, 3) for rank in range(3)), "index.json"])
def test_a_disk_that_is_full_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    tree = {f"x{i}": np.full(100, i) for i in range(6)}
    if overwrite:
        D.save(tmp_path / "s", {"old": 1})
    plain = builtins.open

    def limited(path: Any, *args: Any, **options: Any) -> Any:
        file = plain(path, *args, **options)
        return FullDisk(file, 1000) if isinstance(path, str) and os.path.basename(path) == name else file

    monkeypatch.setattr(builtins, "open", limited)
    errors = on_ranks(3, lambda group: D.save(tmp_path / "s", tree, group=group, overwrite=overwrite))
    monkeypatch.undo()
    failing = int(name[6:11]) if name != "index.json" else 0
    for rank, error in enumerate(errors):
        assert isinstance(error, SaveFileError) and error.errno == errno.ENOSPC
        assert "No space left on device; free some space" in str(error)
        assert (f"rank {failing}: " in str(error)) == (rank != failing)
    assert visible(tmp_path) == (["s"] if overwrite else [])
    if overwrite:
        assert D.load(tmp_path / "s") == {"old": 1}


def test_nothing_is_left_when_any_rank_hears_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    discard = folder.discard

    def slow(made: str) -> None:
        time.sleep(0.2)
        discard(made)

    monkeypatch.setattr(folder, "discard", slow)

    def save(group: Any) -> list[str]:
        kind = Wrong if group.rank == 1 else Part
        with pytest.raises(SaveError):
            D.save(tmp_path / "s", {"x": kind(np.ones(9), 3 * group.rank, 3 * group.rank + 3)}, group=group)
        return visible(tmp_path)

    assert on_ranks(3, save) == [[], [], []]


def test_an_exception_on_one_rank_reaches_all(tmp_path: Path) -> None:
    class Broken(Part):
        def local(self) -> Any:
            raise ZeroDivisionError("mine")

    def save(group: Any) -> None:
        kind = Broken if group.rank == 1 else Part
        D.save(tmp_path / "s", {"x": kind(np.ones(9), 3 * group.rank, 3 * group.rank + 3)}, group=group)

    errors = on_ranks(3, save)
    assert [type(e) for e in errors] == [DistributedError, ZeroDivisionError, DistributedError]
    assert str(errors[0]) == "save: rank 1: mine (ZeroDivisionError)"
    assert visible(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(Part):
        def local(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        D.save(tmp_path / "s", {"x": Interrupted(np.ones(9), 0, 9)})
    assert visible(tmp_path) == []


def test_a_file_missing_for_one_rank_is_an_error_on_all_and_changes_nothing(tmp_path: Path) -> None:
    whole = np.arange(8, dtype="f4")
    all_well(on_ranks(4, lambda g: D.save(tmp_path / "s", {"x": part_of(whole, g.rank, 4)}, group=g)))
    (tmp_path / "s" / index.shard_name(3, 4)).unlink()
    parts = [part_of(whole * 0, rank, 2) for rank in range(2)]
    errors = on_ranks(2, lambda g: D.load(tmp_path / "s", {"x": parts[g.rank]}, group=g))
    for error in errors:
        assert isinstance(error, FileNotFoundError) and "shard-00003-of-00004.safetensors" in str(error)
    assert not any(part.data.any() for part in parts)
    assert "rank 1: " in str(errors[0])


def test_nobody_waits_for_long_nor_works_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with more to write than others meets them after each round, and stops in the round in which one fails."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 16)
    monkeypatch.setattr(shards, "ROUND_BYTES", 256)
    x = np.arange(1000, dtype="f8")  # 8000 bytes on rank 0
    met: list[int] = []

    def save(group: Any, name: str, kind: Any) -> None:
        exchange = group.exchange_objects
        if group.rank == 1:
            group.exchange_objects = lambda given: (met.append(1), exchange(given))[1]
        part = Part(x, 0, 990) if group.rank == 0 else kind(x, 990, 1000)
        D.save(tmp_path / name, {"x": part}, group=group)

    all_well(on_ranks(2, lambda group: save(group, "s", Part)))
    assert len(met) > 8000 // 256
    wrote: list[int] = []
    checksum = shards.crc32
    monkeypatch.setattr(shards, "crc32", lambda data: (wrote.append(len(data)), checksum(data))[1])
    errors = on_ranks(2, lambda group: save(group, "t", Wrong))
    assert all(isinstance(e, SaveError) for e in errors)
    if sys.platform == "linux":  # the errors, which know all frames, keep no file open
        assert not any(".t.tmp-" in os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    assert 0 < sum(wrote) < 1000
    met.clear()

    def load(group: Any) -> None:
        exchange = group.exchange_objects
        group.exchange_objects = lambda given: (met.append(1), exchange(given))[1]
        assert np.array_equal(D.load(tmp_path / "s", {"x": x * 0}, group=group)["x"], x)

    all_well(on_ranks(1, load))
    assert len(met) == 4  # after one array larger than a round


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
        exchange, calls = group.exchange_objects, itertools.count()

        def hidden(x: object) -> Any:
            told = exchange(x)
            if next(calls) == 2 and group.rank == 0:  # all have written
                next(tmp_path.glob(".s.tmp-*/shard-00001*")).unlink()
            return told

        group.exchange_objects = hidden
        D.save(tmp_path / "s", {f"x{i}": tg.ones(3) for i in range(4)}, group=group)

    for error in on_ranks(2, save):
        assert isinstance(error, SaveFileError) and "all ranks must save to one disk that they share" in str(error)
    assert visible(tmp_path) == []


LIMITED = """
import resource, signal, sys
import numpy as np
import tapegrad as tg
tg.distributed.save(sys.argv[1], {"x": np.ones(10)})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    tg.distributed.save(sys.argv[1], {"x": np.ones(20000)}, overwrite=True)
except OSError as error:
    assert isinstance(error, tg.errors.TapegradError) and "File too large" in str(error), error
    assert tg.distributed.load(sys.argv[1])["x"].shape == (10,)
    print("refused")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of files")
def test_a_limit_of_the_system_leaves_the_old_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path / "s"], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr
    assert visible(tmp_path) == ["s"]


def test_long_work_shows_a_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    D.save(tmp_path / "quiet", tg.ones(1024))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    D.save(tmp_path / "s", tg.ones(1024))
    shown = capsys.readouterr().err
    assert "\rsave s: 1.00 KiB of 4.00 KiB\rsave s: 2.00 KiB of 4.00 KiB" in shown
    assert shown.endswith("\r" + " " * 28 + "\r")
    D.load(tmp_path / "s")
    assert "\rload s: 3.00 KiB of 4.00 KiB" in capsys.readouterr().err
