"""Captured steps as CUDA graphs: one request for all works, the bits of eager, and what stays outside."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured import alike, bits
from inside import array_of
from shim import standin

import tapegrad as tg
import tapegrad.nn.functional as F
from tapegrad.device import asdevice
from tapegrad.errors import GraphError

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.sampled(1 / 2)]


def data(*shape: int, seed: int = 0, dtype: str = "float32") -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype), device="cuda")


def training(function: Callable[..., Any], layers: int, rate: float = 0.01) -> tuple[Any, Callable[[int], Any]]:
    """A captured training step with dropout and Adam, and what a call of it gives and leaves."""
    weights = [tg.Variable(data(8, 8, seed=i)) for i in range(layers)]
    biases = [tg.Variable(data(8, seed=i)) for i in range(layers)]
    variables = [*weights, *biases]
    optimizer = tg.optim.Adam(rate)

    @function
    def step(x: tg.Tensor, y: tg.Tensor) -> tg.Tensor:
        with tg.GradientTape() as tape:
            h = x
            for w, b in zip(weights, biases, strict=True):
                h = F.dropout(tg.tanh(h @ w + b), 0.1)
            loss = tg.mean((h - y) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step, lambda k: (step(data(4, 8, seed=k), data(4, 8, seed=k + 50)), [v.numpy() for v in variables])


def kinds() -> Counter[str]:
    return Counter(entry.kind for entry in standin.events)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_training_step_has_the_bits_of_eager(layers: int) -> None:
    def program(function: Callable[..., Any]) -> Any:
        _, call = training(function, layers)
        return [call(k) for k in range(9)]

    (f,) = alike(program, (1, 7))
    assert "as 1 CUDA graph" in f.explain(data(4, 8), data(4, 8)) and "one by one" not in f.explain(
        data(4, 8), data(4, 8)
    )


def test_a_replay_is_two_graphs_and_allocates_results_alone() -> None:
    for layers in (2, 9):
        step, call = training(tg.function, layers)
        for k in range(8):
            call(k)
        x, y = data(4, 8), data(4, 8)
        standin.events.clear()
        standin.launches.clear()
        step(x, y)
        assert kinds()["graph"] == 2  # the works, and the new values of variables
        assert kinds()["malloc"] == 1  # the loss
        assert kinds()["h2d"] == 1  # rate, step count, positions of random streams


def test_a_variable_whose_old_value_is_held_is_not_overwritten() -> None:
    def program(function: Callable[..., Any]) -> Any:
        v = tg.Variable(data(6, 5))
        f = function(lambda x: v.assign(v * 0.5 + x).read())
        held, out = [], []
        for k in range(14):
            if k % 3 == 1 or k > 9:
                held.append(v.value())
            out.append(f(data(6, 5, seed=k)))
        return out, held

    alike(program, (1, 12))


def test_a_variable_that_keeps_moving_is_copied() -> None:
    v = tg.Variable(data(6, 5))
    f = tg.function(lambda x: tg.sum((v * x) @ x.T, axis=0))
    x = data(6, 5, seed=1)
    made = []
    for k in range(12):
        v.assign(data(6, 5, seed=k))
        standin.events.clear()
        assert bits(f(x)) == bits(tg.sum((v * x) @ x.T, axis=0))
        made.append(kinds()["graph"])
    assert made[-3:] == [1, 1, 1]


def test_loaded_values_and_numbers_on_the_host() -> None:
    def program(function: Callable[..., Any]) -> Any:
        v, scale = tg.Variable(data(4, 4)), tg.Variable(tg.asarray(np.float32(2), device="cuda"))
        f = function(lambda x, s: v @ x * scale + s)
        out = []
        for k in range(7):
            if k == 4:
                v.assign(np.full((4, 4), 0.5, "float32"))
            if k == 5:
                scale.assign(np.float32(3.0))
            out.append(f(data(4, 4, seed=k), tg.asarray(np.float32(k), device="cuda")))
        return out

    alike(program, (1, 5))


def test_works_that_a_stream_cannot_capture_lie_between_graphs() -> None:
    def program(function: Callable[..., Any]) -> Any:
        f = function(lambda x: tg.exp(tg.cumsum(tg.tanh(x) @ x, axis=0)) @ x - tg.sort(x, axis=1))
        return [f(data(5, 5, seed=k)) for k in range(5)]

    (f,) = alike(program, (1, 3))
    told = f.explain(data(5, 5))
    assert "CUDA graphs" in told and "one by one: argsort: " in told


def test_positions_of_draws_on_the_host_are_not_frozen() -> None:
    def program(function: Callable[..., Any]) -> Any:
        f = function(lambda x: (tg.random.permutation(tg.asarray(np.arange(7), device="cuda")), tg.tanh(x @ x) @ x))
        return [f(data(7, 7, seed=k)) for k in range(6)]

    (f,) = alike(program, (1, 4))
    assert "CUDA graph" in f.explain(data(7, 7))


def test_functions_of_the_users_are_called_at_each_replay() -> None:
    seen = []

    @tg.primitive
    def halved(x: Any) -> Any:
        seen.append(1)
        return x * 0.5

    f = tg.function(lambda x: tg.tanh(halved(tg.sin(x) @ x)) @ x)
    for k in range(5):
        before = len(seen)
        f(data(4, 4, seed=k))
        assert len(seen) > before
    assert "it asks the host at each call" in f.explain(data(4, 4))


def test_a_call_on_a_tape_is_two_graphs() -> None:
    def program(function: Callable[..., Any]) -> Any:
        v = tg.Variable(data(5, 5))
        f = function(lambda x: tg.sum(tg.tanh(x @ v) @ x))
        out = []
        for k in range(6):
            x = data(5, 5, seed=k)
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            standin.events.clear()
            out.append((y, tape.gradient(y, [x, v])))
            if hasattr(f, "stats") and k > 2:
                assert kinds()["graph"] == 1
        return out

    alike(program)


def test_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEGRAD_FUNCTION", "2")
    f = tg.function(lambda x: tg.tanh(x @ x) @ x)
    for k in range(4):
        assert bits(f(data(4, 4, seed=k))) == bits(
            tg.tanh(data(4, 4, seed=k) @ data(4, 4, seed=k)) @ data(4, 4, seed=k)
        )
    assert not kinds()["graph"] and f.stats.replays == 2
    assert "one by one (TAPEGRAD_FUNCTION=2)" in f.explain(data(4, 4))


def test_graphs_multiply_with_a_workspace_of_their_own() -> None:
    f = tg.function(lambda x: tg.tanh(x @ x) @ x)
    x = data(4, 4)
    for _ in range(3):
        f(x)

    def workspaces(run: Callable[..., Any]) -> set[int]:
        standin.events.clear()
        run(x)
        return {event.own[0][0] for event in standin.events if event.name == "gemmStridedBatchedEx"}

    eager, captured = workspaces(lambda x: x @ x), workspaces(f)
    assert len(eager) == len(captured) == 1 and eager != captured
    assert workspaces(lambda x: x @ x) == eager


def test_the_memory_of_a_program_goes_with_it() -> None:
    x = data(64, 64)
    before = asdevice("cuda").usage()[0]
    f = tg.function(lambda x: tg.tanh(x @ x) @ x)
    for _ in range(4):
        f(x)
    assert asdevice("cuda").usage()[0] > before
    f.release()
    assert asdevice("cuda").usage()[0] == before


def test_a_budget_is_kept_by_the_arena_and_what_it_reads() -> None:
    def deep(x: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(20):
                h = tg.tanh(h @ x)
            loss = tg.sum(h)
        return tape.gradient(loss, x)

    plain, x = tg.function(deep), data(64, 64)
    wanted = bits(plain(x))
    nbytes = plain.plan(x).arena_bytes
    f = tg.function(deep, budget=nbytes * 2 // 3)
    for _ in range(4):
        assert bits(f(x)) == wanted
    assert f.plan(x).arena_bytes <= nbytes * 2 // 3 and f.stats.replays == 2


def test_a_capture_always_ends() -> None:
    device: Any = asdevice("cuda")
    x = array_of(data(4))

    def fails() -> None:
        x.fill(1)
        raise ValueError("no")

    with pytest.raises(GraphError, match="ValueError: no"):
        device.graph(fails)
    with pytest.raises(GraphError, match="5 bytes|allocated|bytes"):
        device.graph(lambda: device.xp.empty(5))
    assert not standin.state.captures and gc.isenabled()
    device.graph(lambda: x.fill(3)).launch()
    assert list(x.get()) == [3] * 4


def test_another_thread_works_while_a_stream_captures() -> None:
    """Streams of other threads do not wait for one that is capturing, which waits for none of them."""
    device: Any = asdevice("cuda")
    x, done, go = array_of(data(4)), threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def beside() -> None:
        go.wait(10)
        try:
            with device.xp.cuda.Stream(non_blocking=True):
                (data(3) * 2).numpy()
        except BaseException as e:
            failures.append(e)
        done.set()

    def captured() -> None:
        x.fill(1)
        go.set()
        assert done.wait(10)
        device.call(x.fill, 2)

    thread = threading.Thread(target=beside)
    thread.start()
    graph = device.graph(captured)
    thread.join()
    assert not failures
    device.call(graph.launch)
    assert list(x.get()) == [2] * 4


def test_threads_share_a_program() -> None:
    f = tg.function(lambda x: tg.tanh(x @ x) @ x)
    xs = [data(6, 6, seed=k) for k in range(6)]
    wanted = [bits(tg.tanh(x @ x) @ x) for x in xs]
    for _ in range(3):
        f(xs[0])
    got: dict[int, Any] = {}

    def run(k: int) -> None:
        got[k] = [bits(f(xs[k])) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[k] for k in range(6)] == [[w] * 5 for w in wanted]


def test_what_works_take_for_themselves_is_scratch_memory_of_the_program() -> None:
    """A layer norm's gradients add up in parts: memory that no graph may ask the pool for."""

    def program(function: Callable[..., Any]) -> Any:
        gamma, beta = tg.Variable(data(64)), tg.Variable(data(64))

        @function
        def f(x: tg.Tensor) -> Any:
            with tg.GradientTape() as tape:
                loss = tg.sum(tg.tanh(F.layer_norm(x @ x.T, (64,), gamma, beta)) ** 2)
            return tape.gradient(loss, [gamma, beta])

        return [f(data(64, 64, seed=k)) for k in range(5)]

    (f,) = alike(program, (1, 3))
    assert "as 1 CUDA graph" in f.explain(data(64, 64)) and "one by one" not in f.explain(data(64, 64))
    x = data(64, 64)
    standin.events.clear()
    f(x)
    assert kinds()["malloc"] == 2  # the results


def test_transforms_lie_between_graphs_which_do_not_keep_their_plans() -> None:
    def program(function: Callable[..., Any]) -> Any:
        f = function(lambda x: tg.abs(tg.fft.rfft(tg.tanh(x) @ x, axis=1)) @ tg.ones((9, 9), device="cuda"))
        out = []
        for k in range(5):
            out.append(f(data(16, 16, seed=k)))
            for n in range(3, 24):  # CuPy keeps the plans that were used last
                tg.fft.fft(data(n)).numpy()
        return out

    (f,) = alike(program, (1, 3))
    assert "one by one: rfft: " in f.explain(data(16, 16))


def test_what_cupys_functions_take_is_scratch_memory_of_the_program() -> None:
    """Functions of CuPy's are a part of the one graph, and replays take nothing from the pool but results."""

    def program(function: Callable[..., Any]) -> Any:
        @function
        def f(x: tg.Tensor) -> tg.Tensor:
            n = x.shape[0]
            places = tg.arange(n, dtype="float32", device="cuda") * tg.linspace(0.0, 1.0, n, device="cuda")
            y = tg.cumsum(x, axis=0) @ tg.eye(n, device="cuda") + places
            return tg.sum(tg.flip(tg.roll(y, 3, axis=1), axis=0) * x, axis=1)

        out = []
        for k in range(8):
            out.append(f(data(16, 16, seed=k)))
            data(64, 64) * 2  # takes and leaves memory of the pool between replays
        return out

    (f,) = alike(program, (1, 6))
    told = f.explain(data(16, 16))
    assert "as 1 CUDA graph" in told and "one by one" not in told
    x = data(16, 16)
    standin.events.clear()
    f(x)
    assert kinds()["malloc"] == 1  # the result


def test_a_graph_of_cupys_functions_in_scratch_memory() -> None:
    device: Any = asdevice("cuda")
    xp, x, out = device.xp, array_of(data(100)), array_of(data(100, seed=1))
    scratch = device.scratch()

    def f() -> None:
        scratch.restart()
        xp.copyto(out, xp.cumsum(x * xp.arange(100, dtype="f")) + xp.linspace(0, 1, 100, dtype="f"))

    with pytest.raises(GraphError, match="bytes are allocated"):
        device.graph(f, scratch)
    while scratch.lacks:
        scratch.use(xp.empty(2 * scratch.lacks, "u1"))
        try:
            graph = device.graph(f, scratch)
        except GraphError:
            continue
        break
    for k in range(5):
        values = np.random.default_rng(k).normal(size=100).astype("f")
        x.set(values)
        device.call(graph.launch)
        replayed = out.get()
        f()
        assert replayed.tobytes() == out.get().tobytes()
