"""Works: what they say they write and take is all they are given, and all that they need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_cases import installed

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.core.state import thread
from tapegrad.device import CPU
from tapegrad.engine import make
from tapegrad.engine.cpu.tiles import Tiling
from tapegrad.engine.evaluate import fill
from tapegrad.engine.executor import COUNTED, PLAIN, Counted, Executor, Plain
from tapegrad.engine.work import Work
from tapegrad.ops.apply import barrier


def lent(lies: Any) -> list[np.ndarray]:
    return [np.empty(shape, dtype) for shape, dtype in lies]


def regions() -> list[Any]:
    x = tg.asarray(np.linspace(-1, 1, 2_000_000).reshape(2, -1))
    return [tg.tanh(x) * 2.0 + x, tg.exp(x[:, ::2]) + 1.0]


def reduction(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Work]:
    """A sum, and the work that evaluates it."""
    works: list[Work] = []
    do = PLAIN.do

    def note(work: Work, *temporaries: Any) -> list[Any]:
        works.append(work)
        return do(work, *temporaries)

    monkeypatch.setattr(PLAIN, "do", note)
    total = tg.sum(tg.asarray(np.ones((3, 400_000))) * 2.0)
    return total, works[-1]


@pytest.mark.parametrize("i", [0, 1])
def test_a_region_needs_no_more_than_it_says(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    y = regions()[i]
    work = make.of_region([y._buffer]).work
    outputs, temporaries = lent(work.writes), lent(work.temporaries)
    monkeypatch.setattr(type(CPU), "empty", lambda *args: pytest.fail("memory that was not declared"))
    assert work.run(outputs, temporaries) == outputs
    monkeypatch.undo()
    assert np.array_equal(outputs[0], y.numpy())
    assert sum(t.nbytes for t in temporaries) >= work.scratch_bytes


def test_the_parts_of_a_sum_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    total, work = reduction(monkeypatch)
    assert work.temporaries and total.item() == 2 * 3 * 400_000
    outputs, temporaries = lent(work.writes), lent(work.temporaries)
    monkeypatch.setattr(type(CPU), "empty", lambda *args: pytest.fail("memory that was not declared"))
    work.run(outputs, temporaries)
    assert outputs[0].reshape(()) == total.item()
    with pytest.raises(StopIteration):  # the twin: with fewer it cannot run
        work.run(outputs, temporaries[:-1])


CALLED: dict[str, Callable[[Any], Any]] = {
    "a product": lambda x: x @ x,
    "rows": lambda x: tg.softmax(x),
    "an order": lambda x: tg.sort(x, axis=1),
    "a copy": lambda x: tg.concat([x, x]),
    "a piece": lambda x: tg.take(x, tg.asarray(np.array([2, 0])), axis=0),
}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("what", CALLED)
def test_the_calls_of_a_work_do_what_it_does(what: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies of what it reads, and into other arrays: so a program replays it."""
    with installed() if kind == "cuda" else nullcontext(), tg.device(kind):
        works: list[Work] = []
        do = Executor.do

        def note(executor: Executor, work: Work, temporaries: Any = None) -> list[Any]:
            works.append(work)
            return do(executor, work, temporaries)

        x = tg.asarray(np.random.default_rng(3).normal(size=(60, 60)).astype(np.float32))
        monkeypatch.setattr(Executor, "do", note)
        y = CALLED[what](x)
        fill((y._buffer,))
        (work,) = [w.kept() for w in works if isinstance(w, make.Application)][-1:]
        monkeypatch.undo()
        device = y.device
        reads = [device.array(device.numpy(a)) for a in work.reads]
        outputs = device.arrays(work.writes) if work.writes else [device.empty(y.shape, y.dtype)]
        temporaries = device.arrays(work.temporaries)
        for f, arguments in work.calls(reads, outputs, temporaries):
            f(*arguments)
        assert np.array_equal(device.numpy(outputs[0]).reshape(y.shape), y.numpy())


def test_room_is_made_for_a_result_that_a_library_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA pools let go of what they keep before the library asks the driver."""
    tg.zeros(1)  # every operation is declared
    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    plus = primitive.general("plus", impl=lambda xp, x: x + 1.0, infer=lambda x: x)
    x, asked = np.ones((6, 5)), list[int]()
    aval = tg.asarray(x)._buffer.node.aval
    monkeypatch.setattr(type(CPU), "make_way", lambda device, nbytes: asked.append(nbytes))
    (result,) = make.Application(plus, [x], {}, aval).run([], [])
    assert np.array_equal(result, x + 1) and asked == [x.nbytes]


def test_results_that_lie_otherwise_are_copied_and_noted() -> None:
    """What a program learns from: it makes room that lies as they do from then on."""
    work = make.Application(primitive.REGISTRY["exp"], [], {}, tg.zeros(1)._buffer.node.aval)
    rows = np.arange(6.0).reshape(2, 3)
    outputs = [np.empty((2, 3)), np.empty((2, 3)), np.empty((2, 3), order="F")]
    work.copies(outputs, [np.asfortranarray(rows), rows, rows])
    assert all(np.array_equal(out, rows) for out in outputs)
    assert work.mislaid == {0: (8, 16), 2: (24, 8)}


def test_what_is_explained_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    y = tg.tanh(tg.asarray(np.ones(40_000))) + 1.0
    explained = make.of_region([y._buffer]).work.text()
    texts: list[str] = []
    do = PLAIN.do
    monkeypatch.setattr(PLAIN, "do", lambda work, *rest: texts.append(work.text()) or do(work, *rest))
    y.numpy()
    assert texts == [explained]


def test_a_block_brings_its_executor_and_takes_it_along() -> None:
    def by() -> Executor:
        return thread.executor  # type: ignore[return-value]

    assert by() is PLAIN
    with tg.measure():
        assert by() is COUNTED
        with tg.memory_budget("1GiB"):
            assert by().copies_slivers
            with pytest.raises(KeyError), tg.memory_budget("1MiB"):
                raise KeyError
            assert by().copies_slivers
        assert by() is COUNTED
    assert by() is PLAIN


@pytest.mark.parametrize("block", [tg.measure, lambda: tg.memory_budget("1GiB")], ids=["measure", "budget"])
def test_the_same_works_run_whoever_looks_on(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and in order, forward and back, of small values and of a region; the bits, too."""
    x, w = tg.asarray(np.linspace(-1, 1, 5)), tg.Variable(np.linspace(0.5, 1, 5))
    big = tg.asarray(np.linspace(-1, 1, 40_000))

    def step() -> list[np.ndarray]:
        with tg.GradientTape() as tape:
            tape.watch([x, big])
            y = tg.sum(tg.tanh(x * w + 0.5)) + tg.sum(tg.sigmoid(big) * big) * 1e-3
        return [g.numpy(copy=True) for g in tape.gradient(y, [x, w, big])]

    names: list[tuple[str, ...]] = []
    for kind in (Tiling, make.Application):
        run = kind.run

        def note(work: Work, outputs: Any, temporaries: Any, run: Any = run) -> Any:
            names.append(work.names)
            return run(work, outputs, temporaries)

        monkeypatch.setattr(kind, "run", note)
    plain = step(), list(names)
    names.clear()
    with block():
        watched = step(), list(names)
    assert plain[1] == watched[1] and plain[1]
    for a, b in zip(plain[0], watched[0], strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("block", [tg.measure, lambda: tg.memory_budget("1GiB")], ids=["measure", "budget"])
def test_small_nodes_are_differentiated_alike_whoever_looks_on(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the listed steps of the same nodes in the same order."""
    x, w = tg.asarray(np.linspace(-1, 1, 5)), tg.Variable(np.linspace(0.5, 1, 5))
    names: list[str] = []
    for kind in (Plain, Counted):
        pull = kind.pull

        def note(self: Any, steps: Any, node: Any, ct: Any, residuals: Any, pull: Any = pull) -> Any:
            results = pull(self, steps, node, ct, residuals)
            if results is not None:
                names.append(node.prim.name)
            return results

        monkeypatch.setattr(kind, "pull", note)

    def pulled() -> list[str]:
        names.clear()
        tg.grad(lambda x: tg.sum(tg.tanh(x * w + 0.5) * tg.sigmoid(x)))(x)
        return [name for name, _ in groupby(names)]  # where somebody counts, sums of cotangents are listed steps, too

    plain = pulled()
    with block():
        assert pulled() == plain and len(plain) >= 4


def test_a_dry_run_is_recorded_and_differentiated_as_the_real_one() -> None:
    x = tg.asarray(np.linspace(-1, 1, 5))

    def step() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.tanh(x) * x)
        return tape.gradient(y, x).shape

    found = tg.memory.predict_peak(step, least=False)
    with tg.measure() as m:
        assert step() == (5,)
    assert (found.peak_bytes, found.kernel_runs) == (m.peak_bytes, m.kernel_runs)


def test_an_earlier_value_that_a_dry_run_is_the_first_to_read_is_computed_and_stays() -> None:
    x = tg.asarray(np.linspace(-1, 1, 250_000).reshape(500, -1))
    pending, wanted = tg.tanh(x), tg.tanh(x).numpy()
    assert pending._buffer.array is None
    tg.memory.predict_peak(lambda: pending @ pending, least=False)
    assert pending._buffer.array is not None and np.array_equal(pending.numpy(), wanted)


def test_what_a_gather_reads_is_no_more_than_it_writes_and_no_more_than_there_is() -> None:
    x, every = tg.asarray(np.arange(8.0)), tg.asarray(np.arange(1000) % 8)

    def moved(operand: Any, rows: Any) -> int:
        with tg.measure() as m:
            tg.take(operand, rows, axis=0)
        return m.bytes_moved

    assert moved(x, every[:2]) == 2 * 8 + 2 * 8 + 2 * 8
    assert moved(x, every) == 8 * 8 + 8000 + 8000
    assert moved(tg.broadcast_to(x, (2, 8)), every[:2]) == 8 * 8 + 2 * 8 + 16 * 8  # which lies there once


@pytest.mark.parametrize("impl", [lambda xp, x: xp.cumsum(x, dtype="float64"), lambda xp, x: [1.0, 3.0]])
def test_what_a_library_returns_becomes_an_array_of_the_declared_dtype(impl: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    other = primitive.general("other", impl=impl, infer=lambda x: x)
    y = barrier(other, tg.asarray([1.0, 2.0])).numpy()
    assert type(y) is np.ndarray and y.dtype == np.float32 and y.tolist() == [1.0, 3.0]


def test_memory_that_an_operation_among_processes_takes_has_its_category_and_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))

    def impl(xp: Any, x: Any, *, out: Any, temporaries: Any) -> None:
        (room,) = temporaries
        room[...] = 2.0
        out[...] = x * room[:4]

    taking = primitive.general(
        "taking", impl=impl, infer=lambda x: x, into=True, temporaries=lambda aval, x: [((1000,), aval.dtype)],
        effect=SimpleNamespace(category="communication"),
    )  # fmt: skip
    with tg.measure() as m:
        y = barrier(taking, tg.asarray(np.ones(4)))
    assert y.tolist() == [2.0] * 4
    assert m.peak_by_category["communication"] == 8192


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a reduction in a wider type": lambda x: tg.sum(tg.astype(tg.concat([x] * 100, axis=1), "float16"), axis=1),
    "a reduction that keeps its axis": lambda x: tg.max(x, axis=1, keepdims=True),
    "a product": lambda x: tg.matmul(x, x),
    "a function that writes": lambda x: tg.concat([x, x], axis=1),
    "a function that returns": lambda x: tg.sort(x, axis=0),
    "of several parts": lambda x: tg.cumulative_sum(x, axis=0),
    "indices": lambda x: tg.argmax(x, axis=0),
    "some rows": lambda x: tg.take(x, [2, 0, 2], axis=0),
    "rows that are added": lambda x: tg.grad(lambda u: tg.sum(tg.take(u, [2, 0, 2], axis=0) ** 2))(x),
    "a norm": lambda x: tg.softmax(x, axis=0),
    "a solution": lambda x: tg.linalg.solve(x + 3.0 * np.eye(3), x),
    "created": lambda x: tg.ones((2, 3)) + tg.arange(3) + tg.eye(3)[:2],
    "drawn": lambda x: tg.random.normal((4,), generator=tg.random.Generator(3)),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_calls_do_the_work_on_other_arrays(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program keeps them: with what was read, into arrays that have other contents before."""
    works: list[tuple[Work, list[Any], list[Any]]] = []
    do = PLAIN.do

    def note(work: Work, *temporaries: Any) -> list[Any]:
        reads = [np.array(a) for a in work.reads]
        results = do(work, *temporaries)
        works.append((work, reads, [np.array(a) for a in results]))
        return results

    monkeypatch.setattr(PLAIN, "do", note)
    values = np.random.default_rng(0).normal(size=(3, 3))
    found = OPERATIONS[what](tg.asarray(values))
    found.numpy()
    monkeypatch.undo()
    assert works
    for work, reads, results in works:
        outputs = [np.full_like(a, 77) for a in results]
        kept = work.kept()
        for f, args in kept.calls(reads, outputs, lent(kept.temporaries)):
            f(*args)
        assert all(np.array_equal(a, b) for a, b in zip(outputs, results, strict=True)), work.text()
