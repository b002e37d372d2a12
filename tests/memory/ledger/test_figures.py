"""What the ledger is told of small operations in one step: the same sums as if it is told of each at the time."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from checks import no_garbage

import tapegrad as tg
from tapegrad.autodiff import compiled
from tapegrad.core import account
from tapegrad.core.account import Account
from tapegrad.core.run import Evaluated, Run
from tapegrad.engine import region
from tapegrad.engine.region import set_small
from tapegrad.memory import policies
from tapegrad.memory.budget.manager import Manager
from tapegrad.memory.ledger import figures
from tapegrad.memory.ledger.entries import NO_MORE, Call, Peak
from tapegrad.memory.ledger.figures import Change, Measure, Replayed, new_of_run
from tapegrad.memory.ledger.ledger import LEDGER, Ledger

Program = Callable[[Any, Any], Any]
FIGURES = ("live_bytes", "peak_bytes", "allocated_bytes", "kernel_runs", "bytes_moved", "nodes_run", "cost",
           "live_by_category", "peak_by_category", "peak_by_primitive", "peak_by_line", "restored",
           "evictions")  # fmt: skip
PROGRAMS: dict[str, Program] = {
    "a chain": lambda x, w: tg.tanh(tg.tanh(x) * w) * w,
    "long rules": lambda x, w: tg.atan2(tg.sinh(x), tg.exp(w)) / (1.0 + x * x),
    "one value twice": lambda x, w: (x * x) * (w + w) - x,
    "operands that are views": lambda x, w: tg.sin(x[::-1]) * tg.broadcast_to(w[:1], (5,)),
    "broadcasting": lambda x, w: tg.exp(tg.reshape(x, (5, 1)) * w),
    "numbers": lambda x, w: tg.sum(tg.tanh(x * w)) ** 3 / 2.0,
    "three operands": lambda x, w: tg.where(x > w, x * 2.0, w) + tg.clip(x, -0.5, 0.5),
    "half": lambda x, w: tg.silu(tg.astype(x, tg.float16)) * tg.astype(w, tg.float16),
    "complex": lambda x, w: tg.abs(tg.exp(x * 1j) * w),
    "a checkpoint": lambda x, w: tg.recompute_grad(lambda q: tg.sin(tg.tanh(q) * w))(x * w),
    "a second gradient": lambda x, w: twice(x, w),
}  # fmt: skip


def twice(x: Any, w: Any) -> Any:
    with tg.GradientTape() as inner:
        inner.watch(x)
        y = tg.tanh(x * w)
    return inner.gradient(y, x)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of another test may be freed while bytes are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    assert account.current is account.NOBODY


def measured(f: Program, seed: Any = None) -> tuple[Measure, list[Any]]:
    x, w = (tg.asarray(np.linspace(a, 1.5, 5).astype(np.float32)) for a in (0.25, 0.5))
    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            y = f(x, w)
        grads = tape.gradient(y, [x, w], output_gradients=y if seed else None)
        there = [g.numpy() for g in grads if g is not None]
        del tape, y, grads
    return m, there


def both(f: Program, monkeypatch: pytest.MonkeyPatch, seed: Any = None) -> tuple[Measure, Measure]:
    """The figures where small operations are told of together, and one by one."""
    measured(f, seed)  # constants are made, rules are listed
    together, values = measured(f, seed)
    with monkeypatch.context() as patch:
        patch.setattr(account, "tell_one_by_one", lambda wanted: None)
        patch.setattr(account, "one_by_one", True)
        singly, expected = measured(f, seed)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(values, expected, strict=True))
    return together, singly


@pytest.mark.parametrize("seed", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_sums_are_those_of_nodes_told_one_by_one(name: str, seed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    together, singly = both(PROGRAMS[name], monkeypatch, seed)
    assert {k: getattr(together, k) for k in FIGURES} == {k: getattr(singly, k) for k in FIGURES}


@pytest.mark.parametrize("planted", ["moved", "nbytes", "last_read"])
def test_an_error_in_what_is_told_is_seen(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str, nbytes: int, moved: int, last_read: tuple[int, ...]) -> Evaluated:
        node = Evaluated(name, nbytes, moved, last_read)
        return node._replace(**{planted: () if planted == "last_read" else getattr(node, planted) + 512})

    set_small(region.SMALL)  # sites are forgotten, and rules listed anew
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "Evaluated", wrong)
        together, singly = both(PROGRAMS["a chain"], monkeypatch)
    set_small(region.SMALL)
    LEDGER.mend()  # its sums are for good
    assert any(getattr(together, k) != getattr(singly, k) for k in FIGURES)


def test_what_was_done_before_is_told_to_those_who_counted_then() -> None:
    """Bytes and work that nobody has added up yet, before only one measure is told."""
    x, mine = tg.asarray(np.ones(1000, np.float32)), Measure(detailed=False)
    with tg.measure() as m:
        y = tg.sin(x)
        LEDGER.open(mine)
        z = tg.cos(x)
        with LEDGER.apart(mine):
            del y
            w = tg.tan(x)
        LEDGER.close(mine)
    assert (m.kernel_runs, m.bytes_moved) == (2, 16_000)
    del z, w


def test_sums_that_are_wrong_after_an_exception_are_made_anew() -> None:
    gc.collect()
    with tg.measure() as m:
        x = tg.asarray(np.ones(1000, np.float32)) + 1
        right = m.live_bytes
        LEDGER._entries.live_bytes += 512
        LEDGER._entries.totals["category"]["temporary"] += 512
        LEDGER.mend()
        assert m.live_bytes == right
        assert sum(LEDGER._entries.totals["category"].values()) == right
    del x


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("f", [tg.sin, tg.cumulative_sum])
def test_what_comes_and_goes_at_once_is_in_the_parts_of_the_peak(f: Callable[[Any], Any], kept: bool) -> None:
    """Its coming and its going are all that has happened, or the one is the last of all."""
    gc.collect()
    x = tg.asarray(np.ones(1000, np.float32))
    with tg.measure() as m:
        before = m.live_bytes
        y = f(x)
        if not kept:
            del y
        assert m.peak_bytes == before + 4096
        assert sum(m.peak_by_category.values()) == m.peak_bytes and m.peak_by_category["user"] >= 4096
        assert m.peak_by_primitive[f.__name__] == 4096


@pytest.mark.parametrize("read", [False, True])
def test_what_serves_as_something_else_before_the_peak_is_that_in_its_parts(read: bool) -> None:
    """Whether its coming has been added by then (``read``) or not; what is kept after the peak is not, yet."""
    gc.collect()
    x = tg.asarray(np.ones(4, np.float32))
    found = []
    for timeline in (False, True):
        with tg.measure(timeline=timeline) as m:
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = x * 2.0
                assert not read or m.live_bytes
                z = tg.sin(y)  # keeps y
                w = z * 2.0
                w = tg.sin(tg.reshape(w, (2, 2)))
                if read:
                    del w
            found.append((m.peak_bytes, m.peak_by_category))
            del tape, y, z
            w = None
    assert found[0] == found[1] and found[0][1]["activation"] >= 512


def test_who_reads_the_parts_of_a_peak_keeps_no_higher_one_from_being_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reached while they are worked out."""
    gc.collect()
    x = tg.asarray(np.ones(1000, np.float32))
    work_out, kept = Peak._work_out, list[tg.Tensor]()

    def meanwhile(peak: Peak, sums: Any) -> None:
        assert LEDGER._lock._is_owned(), "else it could be between the peak and who has come by then"  # type: ignore[attr-defined]
        work_out(peak, sums)
        monkeypatch.undo()
        kept.append(tg.cumulative_sum(tg.concat([x, x])))
        assert m.live_bytes  # it is added

    with tg.measure() as m:
        before = m.live_bytes
        tg.cumulative_sum(x)
        monkeypatch.setattr(Peak, "_work_out", meanwhile)
        assert sum(m.peak_by_category.values()) == before + 4096
        assert sum(m.peak_by_category.values()) == m.peak_bytes > before + 8192
    assert sum(m.peak_by_category.values()) == m.peak_bytes


def test_bytes_of_an_array_of_a_walk_are_its_buffers_from_then_on() -> None:
    """Though they were added to the sums as the array's."""
    gc.collect()
    x = tg.asarray(np.ones(4, np.float32))
    reads: list[int] = []

    @tg.custom_gradient
    def read(a: tg.Tensor) -> Any:
        return a * 1.0, lambda ct: (reads.append(m.live_bytes), ct)[1]

    with tg.measure() as m:
        before = m.live_bytes
        with tg.GradientTape() as tape:
            tape.watch(x)
            s = tg.sin(x)
            y = s * read(x)
        grads = tape.gradient(y, [x, s])
        del y, s
        assert reads and LEDGER.by("category")["gradient"] == 2 * 512 == m.live_bytes - before
        del grads, tape
        assert m.live_bytes == before


def test_an_error_within_another_section_leaves_it_to_go_on() -> None:
    """What comes after it, while events are added, is an event of its own: nothing is mended in the middle."""
    gc.collect()
    x = tg.asarray(np.ones(1000, np.float32))
    made: list[tg.Tensor] = []

    def fails_and_makes(x: tg.Tensor) -> None:
        with pytest.raises(AttributeError):
            LEDGER.by("nothing of that name")
        made.append(tg.cumulative_sum(x))

    with tg.measure() as m:
        before = m.live_bytes
        LEDGER._events.append(Call(fails_and_makes, x))
        assert m.live_bytes == before + 4096
        made.clear()
        assert m.live_bytes == before


def test_what_was_half_added_when_an_interrupt_came_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes and its work are in the sums by then; who has come and gone is not."""
    gc.collect()
    x = tg.asarray(np.ones(1000, np.float32))

    def interrupted(sums: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with tg.measure() as m:
        before = m.live_bytes
        kept, gone = tg.sin(x), tg.cos(x)
        del gone
        monkeypatch.setattr(LEDGER, "_follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            m.live_bytes  # noqa: B018
        assert m.live_bytes == before + 4096 and m.peak_bytes == before + 8192
        assert (m.kernel_runs, m.nodes_run, m.allocated_bytes) == (2, {"sin": 1, "cos": 1}, 8192)
        del kept
        assert m.live_bytes == before


class Trap:
    """An event in the midst of which an interrupt comes, once."""

    sprung = False

    @property
    def state(self) -> int:
        if self.sprung:
            return NO_MORE
        self.sprung = True
        raise KeyboardInterrupt


def test_what_an_interrupt_kept_from_being_added_is_added_afterwards() -> None:
    """What has come, what has gone again, several at once, and bytes that were handed on."""
    gc.collect()
    x = tg.asarray(np.ones(4, np.float32))
    with tg.measure() as m:
        before = m.live_bytes
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sin(x) * tg.cos(x)
        kept, gone = tape.gradient(y, x), tg.exp(x)
        del gone
        LEDGER._events.append(Trap())
        with pytest.raises(KeyboardInterrupt):
            m.live_bytes  # noqa: B018
        assert m.live_bytes == before + 2 * 512
        assert m.peak_by_category and sum(m.peak_by_category.values()) == m.peak_bytes
        del kept, y
        assert m.live_bytes == before


@pytest.mark.parametrize("added", [False, True])
def test_what_has_been_counted_stays_so_after_an_interrupt(added: bool) -> None:
    """Until it goes: whether its event has been added to the sums by then or not."""
    gc.collect()
    x = tg.asarray(np.ones(1000, np.float32))
    with tg.measure() as m:
        before = m.live_bytes
        y = tg.cumulative_sum(x)
        if added:
            assert m.live_bytes == before + 4096
        LEDGER.mend(y._buffer)
        assert m.live_bytes == before + 4096
        del y
        assert m.live_bytes == before


def test_what_serves_as_a_gradient_before_anybody_measures_is_one_for_who_measures_then() -> None:
    """Though it was there, as something else, in an earlier measurement."""
    gc.collect()
    x, c = (tg.asarray(np.ones(1000, np.float32)) for _ in range(2))
    with tg.measure() as before:
        pass
    with tg.memory_budget("1GiB"):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x + 1.0
        g = tape.gradient(y, x, output_gradients=c)
        assert g._buffer.root() is c._buffer
        with tg.measure() as m:
            pass
    assert before.live_by_category["input"] >= 8192
    assert m.live_by_category["gradient"] == before.live_by_category.get("gradient", 0) + 4096


BLOCKS: dict[str, Callable[[], Any]] = {
    "nobody": nullcontext,
    "a budget": lambda: tg.memory_budget("1GiB"),
    "a policy": lambda: tg.memory.policy(policies.save_nothing),
}


@pytest.mark.parametrize("keeper", BLOCKS)
def test_categories_are_the_same_whoever_keeps_memory(keeper: str) -> None:
    """What a step leaves: gradients, a parameter, and its momentum."""
    x, w = tg.asarray(np.ones(1000, np.float32)), tg.Variable(np.ones(1000, np.float32))
    optimizer = tg.optim.SGD(0.1, momentum=0.9)
    gc.collect()
    with tg.measure() as before:
        pass
    with BLOCKS[keeper](), tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.sin(x) * w)
        g = tape.gradient(y, [x, w])
        optimizer.apply([g[1]], [w])
        del tape, y
    more = Counter(m.live_by_category)
    more.subtract(before.live_by_category)
    assert [more[k] for k in ("gradient", "optimizer", "parameter", "temporary")] == [8192, 4096, 0, 0]


def test_who_keeps_memory_tells_who_counts_of_all_that_it_counts() -> None:
    """A budget's account is the ledger's, and more: it leaves out nothing that the ledger does."""
    names = [name for name in vars(Account) if getattr(Ledger, name) is not getattr(Account, name)]
    assert "labelled_each" in names and len(names) > 20
    assert [name for name in names if getattr(Manager, name) is getattr(Account, name)] == []


def test_a_change_by_hand() -> None:
    """Three values, of which the first goes when the second is there; the most at once is two."""
    run = Run((Evaluated("exp", 100, 200), Evaluated("sin", 600, 700, (0,)), Evaluated("add", 8, 616)), (1, 2))
    change = new_of_run(run)
    assert run.change is change
    assert (change.allocated, change.net, change.top) == (512 + 1024 + 512, 1536, 1536)
    assert change.inside == [(512, "exp"), (1024, "sin")] and change.stays == [(1024, "sin"), (512, "add")]
    assert (change.kernels, change.moved, change.cost) == (3, 1516, 7110)
    assert Change(Run((Evaluated("exp", 100, 200),))).inside is None


def test_a_peak_inside_is_what_was_there_then() -> None:
    x = tg.asarray(np.ones(4, np.float32))
    run = Run((Evaluated("exp", 512, 0), Evaluated("sin", 1024, 0, (0,))), (1,))
    with tg.measure() as m:
        before, parts = m.live_bytes, m.peak_by_primitive
        y = tg.tanh(x)
        assert account.current.evaluated(run, (made := tg.tanh(x)._buffer), ()) and m.live_bytes == before + 1024 + 1024
    assert m.peak_bytes == before + 1024 + 512 + 1024
    assert {k: n - parts.get(k, 0) for k, n in m.peak_by_primitive.items() if n != parts.get(k, 0)} == {
        "tanh": 1024, "exp": 512, "sin": 1024,
    }  # fmt: skip
    del y, made


def test_what_is_made_again_costs_what_it_cost_before() -> None:
    x = tg.asarray(np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32))

    def step() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(6):
                h = tg.softmax(h)
            y = tg.sum(h)
            del h
        tape.gradient(y, x)

    step()
    with tg.measure() as plain:
        base = plain.live_bytes
        step()
    with tg.memory_budget(base + 5 * 1024), tg.measure() as m:
        step()
    assert m.evictions and m.restored and plain.restored_cost == 0
    assert m.restored_cost == m.cost - plain.cost == m.restored * (1 + 2 * 1024)


def test_replays_by_hand() -> None:
    """Of two arenas that are as large the later one is shown."""
    nodes, arenas = Counter(exp=1, sin=2), [{"temporary": 512}, {"input": 256, "user": 256}, {"gradient": 100}]
    with tg.measure() as m, tg.measure() as inner:
        for number, arena in enumerate(arenas):
            LEDGER.replayed(Replayed(3, 100, nodes, 2, arena, number, lambda: None, lambda: None))  # type: ignore
        assert m.arena_by_category == arenas[1]
    for each in (m, inner):
        assert (each.kernel_runs, each.bytes_moved, each.restored) == (9, 300, 6)
        assert each.nodes_run == Counter(exp=3, sin=6) and each.arena_by_category == arenas[1]


@pytest.mark.parametrize("seed", [True, None])  # None: of ones, which are one element, repeated
def test_the_compiled_backward_runs_inside_measure(seed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is what runs: the listed steps as one function, though somebody counts."""
    taken: list[str] = []
    run = compiled.Steps.run
    monkeypatch.setattr(compiled.Steps, "run", lambda *a: taken.append("steps") or run(*a))
    chain: Program = lambda x, w: tg.tanh(tg.tanh(x) * w) + x
    measured(chain, seed)
    assert not taken
    with tg.measure(timeline=True):
        measured(chain, seed)
    assert taken


def test_a_printed_measure_is_one_line() -> None:
    with tg.measure(timeline=True) as m:
        v = tg.Variable(np.ones(1024, np.float32))
        tg.grad(lambda x: tg.sum(tg.recompute_grad(tg.tanh)(x)))(v)
    assert len(m.samples) > 3
    peak, live = r"<Measure: peak [\d.]+ KiB \(.*\bparameter 4.00 KiB\b.*\)", r"live [\d.]+ KiB"
    assert re.fullmatch(rf"{peak}; {live}; kernels: \d+, which moved [\d.]+ KiB; reruns: 1>", str(m)), m
    parts = {"category": {"input": 100, "gradient": 4 << 20}}
    made = Measure(3 << 20, 5 << 20, peak_parts=parts, evictions=7, detailed=False)
    assert repr(made) == "<Measure: peak 5.00 MiB (gradient 4.00 MiB, input 100 B); live 3.00 MiB; values dropped: 7>"


def test_no_place_is_held_when_nothing_counts() -> None:
    code: Any = compile("y = tg.tanh(x)", "<made>", "exec")
    before = sys.getrefcount(code)
    with no_garbage(), tg.measure():
        exec(code, {"tg": tg, "x": tg.asarray(np.ones(4, np.float32))})
    assert sys.getrefcount(code) == before


def test_of_sizes_that_are_too_many_none_is_kept_and_all_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MOST_KNOWN", 4)
    monkeypatch.setattr(figures, "_of_bytes", {})
    for _ in range(2):
        for nbytes in range(512, 512 * 8, 512):
            change = figures.of_bytes(nbytes, "exp")
            assert (change.net, change.top) == (nbytes, nbytes) and figures.of_bytes(nbytes, "exp") is change
            assert 1 <= len(figures._of_bytes) <= 4
