"""What ``Layer.save`` and ``distributed.save`` have in common.

What was saved comes back to the bit, and nothing changes when what is loaded does not fit or is damaged.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed.saved_values import X, Y

import tapegrad as tg
from tapegrad import distributed as D
from tapegrad import nn, optim
from tapegrad.errors import SaveError, TapegradError

safetensors_numpy = pytest.importorskip("safetensors.numpy")
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip


class Saver(NamedTuple):
    """A way to save a model and its optimizer, by the same names."""

    source: str
    save: Callable[..., None]
    load: Callable[..., Any]
    file: Callable[[Path], Path]
    """The safetensors file."""


def tree(model: Any, optimizer: Any = None) -> dict[str, Any]:
    return {"": model} | ({} if optimizer is None else {"optimizer": optimizer})


SAVERS = [
    Saver("file", lambda path, m, *o: m.save(path, *o), lambda path, m, *o: m.load(path, *o), lambda path: path),
    Saver(
        "folder", lambda path, *of: D.save(path, tree(*of), overwrite=True),
        lambda path, *of: D.load(path, tree(*of), strict=len(of) > 1),
        lambda path: Path(path) / "shard-00000-of-00001.safetensors",
    ),
]  # fmt: skip


@pytest.fixture(params=SAVERS, ids=lambda saver: saver.source)
def saver(request: Any) -> Saver:
    return request.param


class Model(nn.Layer):
    def __init__(self, width: int = 4, wrapped: bool = False) -> None:
        super().__init__()
        block = nn.Sequential([nn.Dense(width, activation="tanh"), nn.LayerNormalization()])
        self.blocks = [tg.recompute_grad(block) if wrapped else block]
        self.head = nn.Dense(2)

    def call(self, x: Any) -> Any:
        return self.head(self.blocks[0](x))


def built(seed: int, **options: Any) -> Model:
    tg.random.seed(seed)
    model = Model(**options)
    model(X)
    return model


def train(model: Model, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        with tg.GradientTape() as tape:
            loss = nn.functional.mse_loss(model(X), Y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def trained(seed: int, optimizer: optim.Optimizer) -> Model:
    model = built(seed)
    train(model, optimizer, 1)
    return model


def values(*owners: Any) -> list[bytes]:
    return [v.numpy().tobytes() for owner in owners for v in owner.variables]


def holder(**variables: Any) -> Any:
    layer = nn.Layer()
    for name, value in variables.items():
        setattr(layer, name, tg.Variable(value))
    return layer


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# What comes back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [optim.SGD, lambda: optim.SGD(momentum=0.9), optim.Adam, optim.AdamW])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, saver: Saver, make: Any) -> None:
    model, optimizer = built(1), make()
    train(model, optimizer, 3)
    saver.save(tmp_path / "m", model, optimizer)
    train(model, optimizer, 3)
    other, resumed = built(2, wrapped=True), make()
    saver.load(str(tmp_path / "m"), other, resumed)
    train(other, resumed, 3)
    assert values(other, resumed) == values(model, optimizer)
    assert int(resumed.iterations) == 6
    weights = built(3)
    saver.save(tmp_path / "m", model, optimizer)
    saver.load(tmp_path / "m", weights)  # without the optimizer's state, which is there
    assert values(weights) == values(model)
    assert names(tmp_path) == ["m"]


def test_names_are_paths_and_the_package_safetensors_reads_them(tmp_path: Path, saver: Saver) -> None:
    model, optimizer = built(1, wrapped=True), optim.Adam()
    train(model, optimizer, 1)
    saver.save(tmp_path / "m", model, optimizer)
    arrays = safetensors_numpy.load_file(saver.file(tmp_path / "m"))
    paths = [
        "blocks.0._stack.0.kernel", "blocks.0._stack.0.bias", "blocks.0._stack.1.gamma", "blocks.0._stack.1.beta",
        "head.kernel", "head.bias",
    ]  # fmt: skip
    state = ["optimizer/iterations", *(f"optimizer/{slot}/{p}" for p in paths for slot in "mv")]
    assert sorted(arrays) == sorted(paths + state)
    assert np.array_equal(arrays["head.kernel"], model.head.kernel.numpy())


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn"])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, saver: Saver, dtype: str) -> None:
    shapes = {"scalar": (), "none": (0, 3), "flat": (5,), "cube": (2, 3, 4)}
    with tg.device("cpu"):  # GPUs have no arrays of float8
        kind = tg.zeros((), dtype=dtype).dtype
        raw = np.frombuffer(np.random.default_rng(1).bytes(24 * kind.itemsize), "u1") & (1 if dtype == "bool" else 255)
        arrays = {name: raw.view(kind)[: int(np.prod(shape))].reshape(shape) for name, shape in shapes.items()}
        layer = holder(**arrays)
        layer.again = layer.cube  # shared: saved once
        saver.save(tmp_path / "m", layer)
        other = holder(**{name: np.zeros_like(x) for name, x in arrays.items()})
        saver.load(tmp_path / "m", other)
        assert values(other) == [x.tobytes() for x in arrays.values()]
    read = safetensors_numpy.load_file(saver.file(tmp_path / "m")) if not dtype.startswith("float8") else arrays
    assert set(read) == set(shapes)
    for name, x in read.items():
        x = x[..., 0] + 1j * x[..., 1] if dtype == "complex128" and x.dtype == "float64" else x  # pairs of them
        assert (str(x.dtype), x.shape, x.tobytes()) == (dtype, shapes[name], arrays[name].tobytes())


def test_nothing_need_be_installed(tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.numpy", "mpi4py"):
        monkeypatch.setitem(sys.modules, name, None)
    model, other = built(1), built(2)
    saver.save(tmp_path / "m", model)
    saver.load(tmp_path / "m", other)
    assert values(other) == values(model)


# What cannot be saved ------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_named(tmp_path: Path, saver: Saver) -> None:
    twice = holder(a=1.0)
    twice.b = {"c": {"d": tg.Variable(1.0)}, "c.d": tg.Variable(1.0)}
    other = optim.Adam()
    other.build([tg.Variable(1.0)])
    with tg.device("cpu"):  # GPUs have no such numbers
        long = holder(x=np.ones(2, "longdouble"))
    for model, optimizer, says in (
        (nn.Dense(2, name="d"), (), 'Dense "d" has no variables yet: call it once'),
        (twice, (), "two variables have the path 'b.c.d'"),
        (built(1), (other,), "keeps 2 state variables for variables that are not in"),
        (long, (), "x: safetensors cannot hold .*; convert it"),
    ):
        with pytest.raises(SaveError, match=says):
            saver.save(tmp_path / "m", model, *optimizer)
    assert names(tmp_path) == []


@pytest.mark.parametrize("op", ["save", "load"])
def test_what_the_system_refuses_is_a_save_error(tmp_path: Path, saver: Saver, op: str) -> None:
    model = built(1)
    (tmp_path / "file").write_bytes(b"")
    missing = "there is no such folder" if (saver.source, op) == ("folder", "load") else "make the folder .*none first"
    for path, kind, says in (
        (tmp_path / "none" / "m", FileNotFoundError, missing),
        (tmp_path / "file" / "m", OSError, "a part of the path is a file, not a folder|there is no such folder"),
        (tmp_path / ("a" * 300), OSError, "File name too long; give a shorter name|there is no such folder"),
        ("", ValueError, "'' cannot be the name of a file"),
        ("m\0", ValueError, "cannot be the name of a file"),
    ):
        with pytest.raises(SaveError, match=says) as caught:
            getattr(saver, op)(path, model)
        assert isinstance(caught.value, kind) and str(caught.value).startswith(f"{op}: ")
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_permission_is_asked_for(tmp_path: Path, saver: Saver) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SaveError, match="Permission denied; get the permission, or give another path"):
        saver.save(tmp_path / "m", built(1))


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of files")
def test_a_limit_of_the_system_leaves_what_was_there(tmp_path: Path, saver: Saver) -> None:
    import resource

    layer = holder(a=np.ones(10, "f4"))
    saver.save(tmp_path / "m", layer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match="^save: .*File too large") as caught:
            saver.save(tmp_path / "m", holder(a=np.zeros(20000, "f4")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value, SaveError) and names(tmp_path) == ["m"]
    layer.a.assign(np.zeros(10, "f4"))
    saver.load(tmp_path / "m", layer)
    assert values(layer) == [np.ones(10, "f4").tobytes()]


def test_links_are_followed(tmp_path: Path, saver: Saver) -> None:
    (tmp_path / "real").mkdir()
    saver.save(tmp_path / "real" / "m", built(1))
    (tmp_path / "link").symlink_to(tmp_path / "real" / "m")
    model, other = built(2), built(3)
    saver.save(tmp_path / "link", model)
    saver.load(tmp_path / "real" / "m", other)
    assert (tmp_path / "link").is_symlink() and values(other) == values(model)
    assert names(tmp_path / "real") == ["m"]


def test_folders_and_pipes_are_not_replaced_by_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SaveError, match="is a device or pipe, which a file would replace"):
        built(1).save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    for op in (built(1).save, built(1).load):
        with pytest.raises(OSError, match="Is a directory; give the name of a file in it"):
            op(tmp_path)


# What cannot be loaded -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path, saver: Saver) -> None:
    optimizer = optim.Adam()
    model = trained(1, optimizer)
    model.more, model.double = tg.Variable(1.0), tg.Variable(np.ones(3))  # type: ignore[attr-defined]
    saver.save(tmp_path / "m", model, optimizer)
    other, fresh = built(2, width=5), optim.Adam()
    other.fewer, other.double = tg.Variable(1.0), tg.Variable(np.ones(3, "f4"))  # type: ignore[attr-defined]
    before = values(other)
    with pytest.raises(SaveError, match="nothing was changed:\n") as caught:
        saver.load(tmp_path / "m", other, fresh)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    for line in (
        f"blocks.0._stack.0.kernel: wanted shape (3, 5), the {saver.source} has (3, 4)",
        f"double: wanted dtype float32, the {saver.source} has float64",
        f"fewer: missing in the {saver.source}",
    ):
        assert line in lines
    assert len(lines) == 11 and lines[-1].startswith("and ") and lines[-1].endswith(" more")
    assert values(other) == before and fresh.variables == [fresh.iterations]
    few, small = tmp_path / "few", holder(a=1.0, b=2.0)
    saver.save(few, small)
    with pytest.raises(SaveError, match=f"\n  c: missing in the {saver.source}\n  b: in the {saver.source} only$"):
        (saver.load if saver.source == "file" else D.load)(few, holder(a=1.0, c=2.0))


def test_an_optimizer_of_another_kind(tmp_path: Path, saver: Saver) -> None:
    model = built(1)
    saver.save(tmp_path / "m", model)
    with pytest.raises(SaveError, match="holds no optimizer state; call load without|class: missing in the folder"):
        saver.load(tmp_path / "m", model, optim.Adam())
    optimizer = optim.Adam()
    train(model, optimizer, 1)
    saver.save(tmp_path / "m", model, optimizer)
    other = optim.AdamW()
    with pytest.raises(SaveError, match="the state of Adam, not of AdamW|wanted 'AdamW', the folder has 'Adam'"):
        saver.load(tmp_path / "m", model, other)
    assert other.variables == [other.iterations]


def test_files_that_are_missing_or_cut_off(tmp_path: Path, saver: Saver) -> None:
    layer = holder(a=np.arange(6.0))
    with pytest.raises(
        FileNotFoundError, match="load: .*m: .*no such fil|load: .*m: there is no such folder"
    ) as caught:
        saver.load(tmp_path / "m", layer)
    assert caught.value.errno == errno.ENOENT and isinstance(caught.value, TapegradError)
    saver.save(tmp_path / "m", layer)
    path = saver.file(tmp_path / "m")
    nbytes = path.stat().st_size
    for length in (nbytes + 1, *range(nbytes - 1, -1, -1), nbytes):  # at last all are zeros
        os.truncate(path, length)
        with pytest.raises(SaveError, match=path.name):
            saver.load(tmp_path / "m", layer)
    assert values(layer) == [np.arange(6.0).tobytes()]


def foreign(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8, foreign(b""), foreign(b"\xff"), foreign(b"["  * 100000), foreign([1]), foreign({"a": 1}, b"1"),
        foreign({"a": {}}), foreign(one(), b"1" * 7), foreign(one(), b"1" * 9), foreign(one(shape=[3]), b"1" * 8),
        foreign(one(shape=[-1, -2]), b"1" * 8), foreign(one(shape=[2.0]), b"1" * 8), foreign(one(shape=2), b"1" * 8),
        foreign(one(shape="2"), b"1" * 8), foreign(one(data_offsets=[8, 16]), b"1" * 16),
        foreign(one(data_offsets=[0]), b"1" * 8), foreign(one(data_offsets=["0", "8"]), b"1" * 8),
        foreign(one() | {"b": one()["a"]}, b"1" * 8), foreign(one() | {"b": one()["a"]}, b"1" * 16),
        foreign(one(dtype=[]), b"1" * 8), foreign(one(dtype="X9"), b"1" * 8),
        foreign({"__metadata__": 3, **one()}, b"1" * 8),
        foreign({"__metadata__": {"complex128": "7"}, **one()}, b"1" * 8),
    ],
)  # fmt: skip
def test_files_of_others_are_data_that_may_be_wrong(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m").write_bytes(foreign(one(), np.ones(2, "f4").tobytes()))
    layer = holder(a=np.zeros(2, "f4"))
    layer.load(tmp_path / "m")
    assert values(layer) == [np.ones(2, "f4").tobytes()]
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(SaveError, match="load: .*m"):
        layer.load(tmp_path / "m")
    assert values(layer) == [np.ones(2, "f4").tobytes()]
