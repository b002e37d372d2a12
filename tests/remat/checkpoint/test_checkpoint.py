"""What a rerun finds around it: random numbers and variables that other threads use, too."""

import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device.numerics import bits
from tapegrad.errors import RecomputeError
from tapegrad.remat.offload import tiers

N = 4
HOSTS = {"numpy": lambda: np.random.rand(N), "python": lambda: np.array([random.random() for _ in range(N)])}


def elsewhere(f: Callable) -> Any:
    """``f()``, called in another thread."""
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(f()))
    other.start()
    other.join()
    return found[0]


def checkpointed(f: Callable, x: tg.Tensor) -> tg.Tensor:
    return tg.recompute_grad(f)(x)


def nested(f: Callable, x: tg.Tensor) -> tg.Tensor:
    return tg.recompute_grad(lambda x: tg.recompute_grad(f)(x) * 2.0)(x)


def reversed_(f: Callable, x: tg.Tensor) -> tg.Tensor:
    y = tg.reversible(f, lambda x: x * 0.5)(x, x)
    return y[0] + y[1]


def looped(f: Callable, x: tg.Tensor) -> tg.Tensor:
    return tg.checkpointed_loop(f, x, 5, snapshots=2)


def in_sequence(f: Callable, x: tg.Tensor) -> tg.Tensor:
    return tg.checkpoint_sequential([f, f, f, f], x, segments=2)


WAYS = [checkpointed, nested, reversed_, looped, in_sequence]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


class Drawing:
    """A function that multiplies by random numbers, twice; ``between(run)`` is called between the two draws."""

    def __init__(self, draw: Callable, between: Callable[[int], None] = lambda run: None) -> None:
        self.draw, self.between, self.runs = draw, between, 0
        self.factors: list[np.ndarray] = []

    def __call__(self, x: tg.Tensor) -> tg.Tensor:
        self.runs += 1
        first = self.draw()
        self.between(self.runs)
        factor = first * self.draw()
        self.factors.append(factor)
        return x * factor


def gradient(way: Callable, f: Callable) -> tg.Tensor:
    x = tg.asarray(np.ones(N))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = way(f, x)
    return tape.gradient(y, x)


@ways
@pytest.mark.parametrize("host", HOSTS)
def test_another_thread_that_draws_in_the_first_run_is_an_error(way: Callable, host: str) -> None:
    draw = HOSTS[host]
    f = Drawing(draw, lambda run: elsewhere(draw) if run == 1 else None)
    with pytest.raises(RecomputeError, match=r"did not draw from .* what the first run drew: another thread"):
        gradient(way, f)


@ways
@pytest.mark.parametrize("host", HOSTS)
def test_another_thread_that_draws_in_a_rerun_is_an_error_and_streams_are_set_back(way: Callable, host: str) -> None:
    draw = HOSTS[host]
    probe = Drawing(draw)
    gradient(way, probe)
    last = probe.runs
    f = Drawing(draw, lambda run: elsewhere(draw) if run == last else None)
    x = tg.asarray(np.ones(N))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = way(f, x)
    before = bits.host_state()
    with pytest.raises(RecomputeError, match=r"tg\.random.*generator that the function makes from a seed"):
        tape.gradient(y, x)
    assert bits.moved(before, bits.host_state()) == ()


@pytest.mark.parametrize("host", HOSTS)
def test_a_step_that_is_rerun_while_another_thread_draws_is_named(host: str) -> None:
    """Whichever it is, recorded or not."""
    draw, runs = HOSTS[host], list[int]()

    def gradient_of(disturbed: int) -> None:
        def step(x: tg.Tensor, i: int) -> tg.Tensor:
            runs.append(i)
            factor = draw()
            if len(runs) == disturbed:
                elsewhere(draw)
            return x * factor

        runs.clear()
        x = tg.asarray(np.ones(N))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.checkpointed_loop(step, x, 6, snapshots=2)
        tape.gradient(y, x)

    gradient_of(0)
    steps = list(runs)
    assert len(steps) > 9
    for run in range(7, len(steps) + 1):
        with pytest.raises(RecomputeError, match=f"(?i)the rerun of step {steps[run - 1]} did not draw from {host}"):
            gradient_of(run)


def test_other_threads_may_draw_while_steps_that_draw_nothing_are_replayed_in_a_row() -> None:
    """The first run has drawn: the loop's condition did."""
    captured, x, rows = tg.function(lambda s: tg.sin(s) * 0.5), tg.asarray(np.ones(N)), list[int]()
    in_a_row = captured.in_a_row

    def disturbed(*args: Any) -> Any:
        done, state = in_a_row(*args)
        if done:
            rows.append(done)
            elsewhere(np.random.rand)
        return done, state

    def run() -> np.ndarray:
        left = iter(range(9))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.checkpointed_loop(
                captured, x, while_=lambda s: np.random.rand() < 2 and next(left, None) is not None, snapshots=1
            )
        return tape.gradient(y, x).numpy()

    run(), run()
    np.random.seed(3)
    plain = run()
    following = np.random.rand(20)
    captured.in_a_row = disturbed  # type: ignore[method-assign]
    np.random.seed(3)
    assert run().tobytes() == plain.tobytes()
    assert rows and np.random.rand() == following[len(rows)]  # no number was drawn twice


@ways
@pytest.mark.parametrize("host", HOSTS)
def test_the_same_numbers_where_nobody_else_draws(way: Callable, host: str) -> None:
    f = Drawing(HOSTS[host])
    gradient(way, f)
    runs = {factor.tobytes() for factor in f.factors}
    assert f.runs > len(runs)  # each rerun took the numbers of a first run


@ways
def test_a_generator_that_the_function_does_not_use_is_left_to_others(way: Callable) -> None:
    probe = Drawing(HOSTS["numpy"])
    gradient(way, probe)
    random.seed(5)
    wanted = [random.random(), random.random()]
    random.seed(5)
    got: list[float] = []
    f = Drawing(HOSTS["numpy"], lambda run: got.append(elsewhere(random.random)) if run == probe.runs else None)
    gradient(way, f)
    assert [*got, random.random()] == wanted


@ways
def test_a_function_that_draws_nothing_does_not_mind_who_draws(way: Callable) -> None:
    drawn: list[float] = []
    runs: list[int] = []

    def f(x: tg.Tensor) -> tg.Tensor:
        runs.append(1)
        if len(runs) == 1:
            drawn.append(elsewhere(np.random.rand))
        return x * 3.0

    before = np.random.get_state()[1].tobytes(), np.random.get_state()[2]
    gradient(way, f)
    np.random.rand()
    assert drawn and (np.random.get_state()[1].tobytes(), np.random.get_state()[2]) != before


def test_threads_may_draw_while_a_function_without_draws_is_rerun() -> None:
    np.random.seed(8)
    wanted = [np.random.rand() for _ in range(4)]
    np.random.seed(8)
    got: list[float] = []

    def f(x: tg.Tensor, is_recomputing: bool) -> tg.Tensor:
        if is_recomputing:
            got.extend(elsewhere(np.random.rand) for _ in range(4))
        return x * 3.0

    release = threading.Event()
    keeper = threading.Thread(target=release.wait)  # alive while the rerun ends, so the draws may be its own
    keeper.start()
    try:
        assert (gradient(checkpointed, f).numpy() == 3.0).all()
    finally:
        release.set()
        keeper.join()
    assert got == wanted


@pytest.mark.parametrize("host", HOSTS)
def test_a_rerun_that_draws_more_is_an_error(host: str) -> None:
    draw = HOSTS[host]
    runs: list[int] = []

    def more(x: tg.Tensor) -> tg.Tensor:
        runs.append(1)
        for _ in runs:
            x = x * draw()
        return x

    with pytest.raises(RecomputeError, match=r"recompute_grad\(more\): the rerun did not draw"):
        gradient(checkpointed, more)


@pytest.fixture
def only_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the threads of other tests, such as that of a browser, which could have drawn."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    enumerate_threads = threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [t for t in enumerate_threads() if t not in others])


@pytest.mark.usefixtures("only_thread")
def test_a_rerun_that_draws_where_the_first_run_drew_nothing_is_an_error() -> None:
    def later(x: tg.Tensor, is_recomputing: bool) -> tg.Tensor:
        return x * np.random.rand(N) if is_recomputing else x * 1.0

    with pytest.raises(RecomputeError, match=r"recompute_grad\(later\): the rerun drew .*the first run did not"):
        gradient(checkpointed, later)


@pytest.mark.usefixtures("only_thread")
def test_what_reads_ahead_from_a_disk_draws_nothing(tmp_path: Path) -> None:
    disk, x = tiers.Disk(tmp_path), tg.asarray(np.ones(4))
    with tg.memory.policy(tg.policies.offload_names("h", tier=disk)), tg.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in range(4):
            y = tg.name(tg.softmax(y), "h")
    tape.gradient(y, x)  # starts a thread, which stays
    assert disk.bytes_read
    test_a_rerun_that_draws_where_the_first_run_drew_nothing_is_an_error()


@ways
def test_what_is_drawn_once_and_kept_is_no_error(way: Callable) -> None:
    kept: list[Any] = []

    def f(x: tg.Tensor) -> tg.Tensor:
        if not kept:
            kept.append(np.random.rand(N))  # as a layer makes its weights at its first call
        return x * kept[0]

    if way is looped:  # its other steps draw nothing either
        gradient(way, f)
    assert np.isfinite(gradient(way, f).numpy()).all()


@ways
@pytest.mark.parametrize("stream", ["default", "own"])
def test_threads_may_share_a_generator_of_tapegrads(way: Callable, stream: str) -> None:
    def run(disturbed: bool) -> tuple[list[bytes], Drawing]:
        generator = tg.random.default_generator if stream == "default" else tg.random.Generator(3)

        def draw() -> np.ndarray:
            return tg.random.uniform((N,), dtype="float64", generator=generator).numpy()

        f = Drawing(draw, lambda run: elsewhere(draw) if disturbed and run in (1, 2) else None)
        x = tg.asarray(np.ones(N))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = way(f, x)
        first = [factor.tobytes() for factor in f.factors]
        after = generator.state
        f.between = lambda run: elsewhere(draw) if disturbed else None
        tape.gradient(y, x)
        assert disturbed or generator.state == after
        return first, f

    for disturbed in (False, True):
        first, f = run(disturbed)
        assert len(f.factors) > len(first)
        assert {factor.tobytes() for factor in f.factors[len(first) :]} <= set(first)


@ways
def test_a_variable_that_another_thread_assigns_in_the_middle_is_an_error(way: Callable) -> None:
    v = tg.Variable(np.full(N, 2.0), name="v")

    def f(x: tg.Tensor) -> tg.Tensor:
        x = x * v
        if not f.disturbed:  # type: ignore[attr-defined]
            f.disturbed = True  # type: ignore[attr-defined]
            elsewhere(lambda: v.assign(np.full(N, 5.0)))
        return x * v

    f.disturbed = False  # type: ignore[attr-defined]
    with pytest.raises(RecomputeError, match=re.escape("another thread assigned to ['v'] while the function ran")):
        gradient(way, f)


def test_a_gradient_inside_does_not_look_like_another_thread() -> None:
    v = tg.Variable(np.full(N, 2.0))
    generator = tg.random.Generator(3)

    @tg.recompute_grad
    def inner(x: tg.Tensor) -> tg.Tensor:
        v.assign_add(np.ones(N))
        return x * x * v * tg.random.uniform((N,), dtype="float64", generator=generator)

    def outer(x: tg.Tensor) -> tg.Tensor:
        y = tg.random.uniform((N,), dtype="float64", generator=generator) * v
        with tg.GradientTape() as tape:
            tape.watch(x)
            z = inner(x)
        y = y * tape.gradient(z, x) * v
        return y * tg.random.uniform((N,), dtype="float64", generator=generator)

    found = []
    for wrap in (lambda f: f, tg.recompute_grad):
        v.assign(np.full(N, 2.0))
        generator.seed(3)
        found.append(gradient(lambda f, x, wrap=wrap: wrap(f)(x), outer).numpy())
        assert (v.numpy() == 3.0).all()
    assert (found[0] == found[1]).all()


def test_gradients_of_some_rows_alone_come_through_a_rerun_as_such() -> None:
    """Where there are many cotangents at once they are whole arrays."""
    table = tg.Variable(np.arange(8.0).reshape(4, 2))
    f = tg.recompute_grad(lambda: tg.sum(tg.take(table.value(), [1, 3], axis=0, sparse_grad=True) ** 2))
    with tg.GradientTape(persistent=True) as tape:
        y = f()
    g = tape.gradient(y, table)
    assert type(g) is tg.IndexedSlices and g.values.tolist() == [[4.0, 6.0], [12.0, 14.0]]
    rows = tape.jacobian(y, table)
    assert type(rows) is tg.Tensor and rows.tolist() == [[0.0, 0.0], [4.0, 6.0], [0.0, 0.0], [12.0, 14.0]]
