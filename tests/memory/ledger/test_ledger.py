"""The ledger: bytes by hand, by category, primitive and line; work done; its agreement with tracemalloc."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checks import c64, no_garbage, same, values, var64
from cuda_cases import installed

import tapegrad as tg
from tapegrad.core import account
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.core.run import Evaluated, Run
from tapegrad.device import CPU
from tapegrad.device.pool import POOL
from tapegrad.memory.ledger import ledger as ledger_module
from tapegrad.memory.ledger.figures import CATEGORIES, Measure, rounded
from tapegrad.memory.ledger.journal import Journal
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import HERE, during

BIG = 20_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of another test may be freed while bytes are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    assert account.current is account.NOBODY


def test_it_costs_nothing_when_unused() -> None:
    assert account.current is account.NOBODY
    x = tg.exp(c64(np.ones(3)))
    assert LEDGER.by("category") == {} and LEDGER.live_bytes == 0
    with tg.measure():
        assert account.current is LEDGER and LEDGER._entries
    assert account.current is account.NOBODY and LEDGER.by("category") == {} and LEDGER.live_bytes == 0
    del x


@pytest.mark.parametrize(("nbytes", "wanted"), [(0, 0), (1, 512), (512, 512), (513, 1024), (10**6, 1000448)])
def test_sizes_are_rounded_as_cupys_pool_rounds_them(nbytes: int, wanted: int) -> None:
    assert rounded(nbytes) == wanted


# Bytes


def test_live_peak_and_allocated_bytes_by_hand() -> None:
    a = c64(np.ones(100))  # 800 bytes: 1024
    with tg.measure() as m:
        base = m.live_bytes
        assert m.peak_bytes == base
        b = a + a
        assert (m.live_bytes - base, m.peak_bytes - base, m.allocated_bytes) == (1024, 1024, 1024)
        c = (b + b) + b  # b + b dies
        assert (m.live_bytes - base, m.peak_bytes - base, m.allocated_bytes) == (2048, 3072, 3072)
        view = c[10:20]
        assert m.live_bytes - base == 2048
        del c
        assert m.live_bytes - base == 2048  # a view keeps its base
        del view, b
        assert m.live_bytes == base
        del a
        assert m.live_bytes == base - 1024
        a = c64(np.ones(100))
    assert (m.live_bytes, m.peak_bytes - base, m.allocated_bytes) == (base, 3072, 4096)
    same(a[0], 1.0)


def test_lazy_values_own_no_bytes_until_they_are_read() -> None:
    a = c64(np.ones(BIG))
    n = rounded(a.nbytes)
    with tg.measure() as m:
        base = m.live_bytes
        b = tg.tanh(a) + a
        assert m.live_bytes == base and m.kernel_runs == 0
        c = tg.exp(b)
        c.numpy()
        assert m.live_bytes - base == n and m.peak_bytes - base == n  # b is recomputed in scratch
        assert m.kernel_runs == 1 and m.nodes_run == Counter(tanh=1, add=1, exp=1)
        assert m.bytes_moved == 2 * a.nbytes and 0 < m.scratch_bytes <= tg.get_num_threads() * 3 * a.nbytes
        b.numpy()
        assert m.live_bytes - base == 2 * n


def test_categories_are_what_the_tape_knows() -> None:
    x, w = c64(np.ones(200)), var64(np.ones(200))
    n = rounded(1600)
    x + 1.0, x * 2.0  # makes the constants
    with tg.measure() as m:
        start = Counter(LEDGER.by("category"))

        def grown() -> dict[str, int]:
            return {k: v // n for k, v in (Counter(LEDGER.by("category")) - start).items() if v // n}

        assert start["parameter"] >= n
        mine = x + x
        assert grown() == {"user": 1}
        given = c64(np.ones(200))
        assert grown() == {"user": 1, "input": 1}
        with tg.GradientTape() as tape:
            h = tg.exp(x * w)  # w wants x, exp its result
            assert grown() == {"user": 1, "activation": 2}  # exp's result, and x, an input before, which w's rule reads
            y = tg.recompute_grad(lambda q: tg.sin(tg.tanh(q)))(h)
            z = y * 2.0
        g = tape.gradient(z, w)
        assert grown()["gradient"] == 1
        w.assign(g)
        del g, tape, h, y, z
        assert grown()["user"] == 1 and "gradient" not in grown() and "temporary" not in grown()
        slot = tg.Variable(mine, category="optimizer")
        assert grown()["optimizer"] == 1
        del given, mine, slot
    assert set(m.peak_by_category) <= set(CATEGORIES) and sum(m.peak_by_category.values()) == m.peak_bytes


def test_what_a_rerun_makes_is_rematerialized() -> None:
    x = c64(np.ones(200))
    seen: list[dict[str, int]] = []

    def f(q: Any, is_recomputing: bool) -> Any:
        h = tg.exp(tg.tanh(q))
        if is_recomputing:
            seen.append(LEDGER.by("category"))
        return tg.sin(h)

    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.recompute_grad(f)(x)
        before = LEDGER.by("category")
        tape.gradient(y, x)
    assert before.get("rematerialized", 0) == 0 and seen[0]["rematerialized"] == 2 * rounded(1600)
    assert (m.reruns, m.evictions) == (1, 0)
    assert m.live_by_category.get("rematerialized", 0) == 0


def test_peaks_by_primitive_and_source_line() -> None:
    x = c64(np.ones(1000))
    with tg.measure() as m:
        kept = [tg.exp(x), tg.exp(x)]
        line = tg.sin(x)
    here = f"{__file__}:{test_peaks_by_primitive_and_source_line.__code__.co_firstlineno + 3}"
    n = rounded(8000)
    assert (m.peak_by_primitive["exp"], m.peak_by_primitive["sin"]) == (2 * n, n)
    assert m.peak_by_line[here] == 2 * n
    assert sum(m.peak_by_primitive.values()) == sum(m.peak_by_line.values()) == m.peak_bytes
    del kept, line


def test_only_what_a_tape_keeps_is_an_activation_when_it_gets_its_bytes() -> None:
    x, n = c64(np.ones(BIG)), rounded(8 * BIG)
    x + 1.0  # makes the constant
    with tg.measure():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
        before, other = Counter(LEDGER.by("category")), x + 1.0
        other.numpy()
        assert Counter(LEDGER.by("category")) - before == {"user": n}
        y.numpy()
        assert Counter(LEDGER.by("category")) - before == {"user": n, "activation": n}
    del tape


def test_the_parts_of_a_peak_are_noted_before_what_was_there_goes() -> None:
    x = c64(np.ones(100))
    with tg.measure() as m:
        live, y = m.live_bytes, tg.exp(x)
        assert m.live_bytes == live + 1024  # adds it
        del y
        assert m.live_bytes == live
        z = tg.sin(c64(np.ones(10)))
    assert (m.peak_bytes - live, m.peak_by_primitive["exp"], m.peak_by_primitive.get("sin")) == (1024, 1024, None)
    del z


@pytest.mark.parametrize("timeline", [False, True])
def test_the_parts_of_a_peak_are_those_when_it_was_reached(timeline: bool) -> None:
    """Not what the same bytes serve as later, when as many are alive."""
    with tg.measure(timeline=timeline) as m:
        before = m.peak_by_category
        x = c64(np.ones(100))
        v = tg.Variable(x, category="optimizer")
        assert LEDGER.by("category")["optimizer"] == before.get("optimizer", 0) + 1024
    assert m.peak_by_category == {**before, "input": before.get("input", 0) + 1024}
    del v


@pytest.mark.parametrize("size", [50, BIG])
@pytest.mark.parametrize("wrap", [tg.recompute_grad, lambda f: f])
def test_after_a_step_only_results_are_left(size: int, wrap: Callable) -> None:
    x, w = c64(np.linspace(0, 1, size)), var64(np.ones(size))
    f = wrap(lambda q: tg.tanh(q * w) * q)

    def step() -> list:
        with tg.GradientTape() as tape:
            y = tg.sum(f(f(x)) ** 2.0)
        return tape.gradient(y, [w])

    with tg.measure():
        step()  # makes the constants that a measured step shares
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        g = step()
        assert m.live_bytes - base == rounded(x.nbytes)
        peak = m.peak_bytes
        del g
        assert m.live_bytes == base
        step()
        assert (m.live_bytes, m.peak_bytes) == (base, peak)


# Work


def test_work_by_hand_for_small_arrays() -> None:
    x, w = c64(np.ones((3, 4))), c64(np.ones((4, 5)))
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        h = tg.matmul(x, w)  # reads 96 + 160, writes 120
        y = tg.tanh(h)  # reads 120, writes 120
        z = y * y  # reads y once, 120, writes 120
    assert m.nodes_run == Counter(matmul=1, tanh=1, multiply=1) and m.kernel_runs == 3
    assert m.bytes_moved == (96 + 160 + 120) + (120 + 120) + (120 + 120)
    with tg.measure() as back:
        tape.gradient(z, x)
    # of z = y * y: ct * y twice, and their sum; of tanh: 1 - y * y, times the cotangent; of matmul: one product
    assert back.nodes_run["matmul"] == 1 and back.nodes_run["tanh"] == 0
    assert back.kernel_runs == sum(back.nodes_run.values())


def test_work_by_hand_for_a_region() -> None:
    n = 8 * BIG
    x, w = c64(np.ones(BIG)), c64(np.full(BIG, 0.5))
    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            y = tg.tanh(x * w)
        assert (m.kernel_runs, m.bytes_moved) == (0, 0)
        gx, gw = tape.gradient(y, [x, w])
        assert m.kernel_runs == 1  # both gradients; tanh(x * w) is remade inside
        assert m.nodes_run["tanh"] == 1
        assert m.bytes_moved == 2 * n + 2 * n + 2 * 8  # and two numbers: the cotangent, and the 1 of tanh's rule
    t = np.tanh(0.5)
    same([gx, gw], [np.full(BIG, 0.5 * (1 - t * t)), np.full(BIG, 1 - t * t)])


def test_no_work_is_counted_for_views_and_reads() -> None:
    x, v = c64(np.ones((4, 5))), var64(np.ones(3))
    with tg.measure() as m:
        tg.reshape(x, (20,)), tg.permute_dims(x, (1, 0)), x[1:, ::2], v.read(), x.numpy(), tg.stop_gradient(x)
    assert (m.kernel_runs, m.bytes_moved, m.nodes_run, m.allocated_bytes) == (0, 0, Counter(), 0)


def test_the_parts_of_a_peak_can_be_asked_for_before_the_block_ends() -> None:
    x = c64(np.ones((100, 100)))
    with no_garbage(), tg.measure() as m:
        y = x @ x
        assert m.peak_by_primitive["matmul"] == rounded(x.nbytes)
    del y


def test_a_copy_that_a_product_makes_of_an_operand_is_work() -> None:
    with installed():
        x, w = (tg.asarray(np.ones(shape), device="cuda") for shape in ((8, 6), (3, 4)))
        with tg.measure() as m:
            x[::2, ::2] @ w
    assert m.kernel_runs == 2 and m.nodes_run == Counter(matmul=1)
    assert m.bytes_moved == (96 + 96) + (96 + 96 + 128)  # the copy, and the product


# Blocks


def test_nested_blocks_count_each_its_own() -> None:
    x = c64(np.ones(100))
    with tg.measure() as outer:
        a = tg.exp(x)
        with tg.measure() as inner:
            assert inner.live_bytes == outer.live_bytes == inner.peak_bytes
            b = tg.exp(x)
        assert (inner.allocated_bytes, inner.kernel_runs) == (1024, 1)
        frozen = inner.live_bytes
        c = tg.exp(x)
        assert account.current is LEDGER
    assert (outer.allocated_bytes, outer.kernel_runs, inner.kernel_runs) == (3072, 3, 1)
    assert inner.live_bytes == frozen == outer.live_bytes - 1024
    del a, b, c


def test_exceptions_leave_the_ledger_right() -> None:
    x = c64(np.ones(100))
    with pytest.raises(KeyError), tg.measure() as m:
        base = m.live_bytes
        try:
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = tg.recompute_grad(lambda q: tg.matmul(tg.exp(q), tg.ones((3, 3), dtype="float64")))(x)
        except ValueError:
            pass
        assert m.live_bytes == base and thread_is_not_rerunning()
        runs = iter([1.0])
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.recompute_grad(lambda q: tg.exp(q) * next(runs))(x)
        with pytest.raises(StopIteration):
            tape.gradient(y, x)
        del y, tape
        assert thread_is_not_rerunning()
        raise KeyError
    assert account.current is account.NOBODY and m.reruns == 1
    with tg.measure() as again:
        assert tg.exp(x) is not None
    assert again.live_by_category.get("rematerialized", 0) == 0


def thread_is_not_rerunning() -> bool:
    return HERE.reruns == HERE.restoring == HERE.walking == 0


def test_bytes_of_other_threads_count() -> None:
    x, made = c64(np.ones(100)), []
    with tg.measure() as m:
        base = m.live_bytes

        def work() -> None:
            for _ in range(50):
                tg.exp(x)
            made.append(tg.exp(x))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert m.live_bytes - base == 4 * 1024 and m.allocated_bytes == 4 * 51 * 1024
        assert m.nodes_run == Counter(exp=204)


def test_a_timeline_has_every_change() -> None:
    x, began = c64(np.ones(100)), time.perf_counter()
    with tg.measure(timeline=True) as m:
        base = m.live_bytes
        y = tg.exp(x)
        del y
    assert [live - base for _, live, _ in m.samples] == [1024, 0]
    times = [t for t, _, _ in m.samples]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= time.perf_counter() - began
    with tg.measure() as quiet:
        tg.exp(x)
    assert quiet.samples == []


def test_a_timeline_has_what_goes_at_once_also_of_what_was_there_before() -> None:
    with tg.measure() as outer:
        x, y = c64(np.ones(100)), c64(np.ones(200))
        live = outer.live_bytes
        with tg.measure(timeline=True) as m:
            del y
            assert [live - now for _, now, _ in m.samples] == [2048]
            del x
            assert [live - now for _, now, _ in m.samples] == [2048, 3072]


def test_who_is_told_apart_needs_not_be_told_one_by_one_and_who_has_a_timeline_goes_on() -> None:
    x = c64(np.ones(100))
    with tg.measure(timeline=True) as m:
        assert account.one_by_one
        with LEDGER.apart(Measure(detailed=False)):
            assert not account.one_by_one
            y = tg.exp(x)
        assert account.one_by_one and not m.samples
        z = tg.exp(x)
        assert len(m.samples) == 1
    del y, z


def test_a_timeline_tells_what_is_kept_for_rules_made_again_or_not() -> None:
    x = c64(np.ones(100))
    with tg.measure(timeline=True) as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.recompute_grad(lambda x: tg.exp(tg.exp(x)))(x))
        tape.gradient(y, x)
    assert all(0 <= kept <= live for _, live, kept in m.samples)
    assert max(kept for _, _, kept in m.samples) == 3072  # what the call was given, and both exponentials


# Agreement with NumPy's own account


def traced() -> int:
    """Bytes of NumPy arrays alive, by tracemalloc's domain for them."""
    shot = tracemalloc.take_snapshot()
    only = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    return sum(s.size for s in shot.filter_traces([only]).statistics("filename"))


@pytest.mark.parametrize("width", [40, 200])
@pytest.mark.parametrize("wrap", [tg.recompute_grad, lambda f: f])
def test_agreement_with_tracemalloc(width: int, wrap: Callable) -> None:
    # Tolerance: the ledger rounds each buffer up to 512 bytes; the pool of large arrays takes whole pages and 64 bytes
    # to align; idle blocks of the pool are nobody's.  So both accounts differ by less than a page a buffer.
    f = wrap(lambda h, w: h + tg.tanh(tg.matmul(h, w) * 0.5))
    accounts: list[tuple[int, int, int]] = []

    def note(m: Any) -> None:
        POOL.free_all_blocks()
        accounts.append((m.live_bytes, traced(), len(LEDGER._entries)))

    POOL.free_all_blocks()
    tracemalloc.start()
    try:
        with tg.measure() as m:
            note(m)
            rng = np.random.default_rng(0)
            ws = [var64(rng.normal(size=(width, width)) * 0.1) for _ in range(6)]
            x = c64(rng.normal(size=(100, width)))
            for _ in range(2):
                note(m)
                with tg.GradientTape() as tape:
                    h = x
                    for w in ws:
                        h = f(h, w)
                    y = tg.sum(h * h)
                note(m)
                gs = tape.gradient(y, ws)
                note(m)
                del h, y, tape
                for w, g in zip(ws, gs, strict=True):
                    w.assign_sub(g * 0.01)
                del w, g
            del gs
            note(m)
    finally:
        tracemalloc.stop()
    (live0, traced0, _), *rest = accounts
    assert rest[1][0] - live0 > 6 * rounded(x.nbytes)
    for live, real, buffers in rest:
        assert abs((live - live0) - (real - traced0)) <= 4096 * buffers, accounts


# The law of memory


def residual_mlp(blocks: int, batch: int, width: int, wrap: Callable) -> tuple[Callable, tg.Tensor, list]:
    """One step of ``h + tanh(h @ w1) @ w2``, block after block; its loss and gradients are returned."""
    rng = np.random.default_rng(0)
    ws = [[var64(rng.normal(size=(width, width)) * 0.1) for _ in range(2)] for _ in range(blocks)]
    fs = [wrap(lambda h, w1=w1, w2=w2: h + tg.matmul(tg.tanh(tg.matmul(h, w1)), w2)) for w1, w2 in ws]
    x = c64(rng.normal(size=(batch, width)))
    flat = [w for pair in ws for w in pair]

    def step() -> list:
        with tg.GradientTape() as tape:
            h = x
            for f in fs:
                h = f(h)
            loss = tg.sum(h * h)
            del h
        return tape.gradient(loss, flat)

    return step, x, flat


@pytest.mark.parametrize(("batch", "width", "temporaries"), [(256, 8, 3), (512, 40, 2)], ids=["small", "lazy"])
def test_peak_of_a_residual_mlp_of_64_blocks_to_the_byte(batch: int, width: int, temporaries: int) -> None:
    blocks = 64
    step, x, ws = residual_mlp(blocks, batch, width, tg.recompute_grad)
    a, w, scalar = rounded(x.nbytes), rounded(ws[0].nbytes), 512
    plain_step, *_ = residual_mlp(blocks, batch, width, lambda f: f)
    wanted, plain = values(step()), values(plain_step())
    assert all(np.array_equal(p, q) for p, q in zip(wanted, plain, strict=True))
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes  # parameters, x, constants
        found = step()
        left = m.live_bytes - base
    # The peak is reached in the gradient of the last block, when nothing has been given back yet.  Alive are
    #   the inputs of blocks 2 to 64 (that of block 1 is x, which was there before)        63 a
    #   the last block's residual: tanh(h @ w1), remade                                     1 a
    #   gradients: of the block's result (it is also that of its input, so far),            1 a
    #     and of tanh's result, ct @ w2.T                                                   1 a
    #   what tanh's rule makes: 1 - t * t and its product with the cotangent;               2 a + t * t while it lasts
    #     lazy arrays: the product alone, the rest stays in scratch                         1 a
    #   the gradient of w2                                                                  1 w
    #   the loss, and the cotangent it begins with                                          2 scalars
    peak = (blocks - 1) * a + 1 * a + 2 * a + (temporaries - 1) * a + w + 2 * scalar
    assert m.peak_bytes - base == peak
    assert left == 2 * blocks * w
    assert m.reruns == blocks
    with tg.measure() as m:
        base = m.live_bytes
        plain_step()
    # The plain function keeps, of every block, its input (all but x) and tanh's result.
    assert m.peak_bytes - base >= (2 * blocks - 1) * a
    same(found[0], wanted[0], rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_does_not_wait_for_a_lock_that_a_thread_of_its_parent_held() -> None:
    code = """
import os, threading
import tapegrad as tg
from tapegrad.memory.ledger.ledger import LEDGER
held, over = threading.Event(), threading.Event()
def hold():
    with LEDGER.held():
        held.set()
        over.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    with tg.measure() as m:
        tg.ones(3) + 1.0
    os._exit(0 if m.peak_bytes else 1)
over.set()
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


AT_EXIT = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
import tapegrad as tg
(block := {block}).__enter__()
early.x = x = tg.sin(tg.ones(500))
early.tape = tg.GradientTape(persistent=True)
early.tape.__enter__()
early.tape.watch(x)
for _ in range(400):
    early.x = x = tg.sin(x)
x.numpy()
sys.hold = [m for name, m in sys.modules.items() if name.startswith(("tapegrad", "early"))]
"""


@pytest.mark.parametrize("block", ["tg.measure()", "tg.measure(timeline=True)", "tg.memory_budget('1MB')"])
def test_values_that_outlive_our_modules_leave_in_silence(block: str) -> None:
    """When the interpreter ends, a module is emptied before one that was imported earlier and holds values of ours."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT.format(block=block)], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# What is alive before a block begins


def test_bytes_made_while_nobody_counted_are_counted_to_the_byte() -> None:
    with tg.measure() as m:
        base = m.live_bytes
    held = [c64(np.ones(100)) for _ in range(5)]
    pending = tg.exp(c64(np.ones(BIG)))  # has no bytes yet
    with tg.measure() as m:
        assert m.live_bytes - base == 5 * 1024 + rounded(8 * BIG)
    made = np.asarray(pending)  # filled while nobody counts
    with tg.measure() as m:
        assert m.live_bytes - base == 5 * 1024 + rounded(8 * BIG)
        del made, pending
        assert m.live_bytes - base == 5 * 1024
        del held[2:]
    with tg.memory_budget("1GiB") as b:
        assert b.live_bytes - base == 2 * 1024
        del held[1:]
        assert b.live_bytes - base == 1024 and b.peak_bytes - base == 2 * 1024
    assert b.live_bytes - base == 1024, "what was alive at the end"


def test_an_array_that_a_walk_made_while_nobody_counted_is_counted_with_its_buffer() -> None:
    with tg.measure() as m:
        before = m.live_bytes
        own = Buffer(None, leaf(shaped((100,), np.dtype("float64"), CPU)))
        own.array = np.zeros(100)
        others = weakref.ref(own.array)  # is no entry
        account.current.owned(own)
        assert m.live_bytes - before == 1024 and others() is own.array
        del own
        assert m.live_bytes == before


class Interrupt(BaseException):
    """As a KeyboardInterrupt."""


def interrupted(*args: object) -> Any:
    raise Interrupt


def bare() -> Buffer:
    """A buffer that nobody counts yet."""
    own = Buffer(None, leaf(shaped((100,), np.dtype("float64"), CPU)))
    own.array = np.zeros(100)
    return own


@pytest.mark.parametrize("followed", [False, True])
def test_an_interrupt_while_events_are_added_loses_none(monkeypatch: pytest.MonkeyPatch, followed: bool) -> None:
    """A buffer comes, another takes over its array's bytes; the interrupt is before or after that is entered."""
    real = LEDGER._follow

    def follow(sums: Any) -> None:
        if followed:
            real(sums)
        monkeypatch.undo()
        raise Interrupt

    with tg.measure() as m:
        before, own = m.live_bytes, bare()
        run = Run((Evaluated("sin", 800, 0),), (0,))
        assert during(LEDGER.pulled, run, own.array, pulls=("temporary", "(here)"))
        m.peak_bytes  # noqa: B018 - has it added
        LEDGER.owned(own)
        new = c64(np.ones(100))
        monkeypatch.setattr(LEDGER, "_follow", follow)
        with pytest.raises(Interrupt):
            LEDGER.settle()
        assert m.live_bytes - before == 2 * 1024
        LEDGER.labelled(own, "gradient")
        by = LEDGER.by("category")
        assert by["gradient"] == 1024 and sum(by.values()) == m.live_bytes
        del own, new
        assert m.live_bytes == before == sum(LEDGER.by("category").values())


def test_a_buffer_that_an_interrupt_kept_from_being_counted_does_not_count_when_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tg.measure() as m:
        before, own = m.live_bytes, bare()
        with monkeypatch.context() as patch, pytest.raises(Interrupt):
            patch.setattr("tapegrad.memory.ledger.ledger.of_bytes", interrupted)
            LEDGER.allocated(weakref.ref(own))
        del own
        assert m.live_bytes == before


def test_a_frozen_collector_hides_nothing() -> None:
    with tg.measure() as m:
        base = m.live_bytes
    held = c64(np.ones(100))
    gc.freeze()
    try:
        with tg.measure() as m:
            assert m.live_bytes - base == 1024
    finally:
        gc.unfreeze()
    del held


def test_what_is_known_from_another_block_is_labelled_anew() -> None:
    v = var64(np.ones(200))
    x = c64(np.ones(100))
    with tg.measure():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
        g = tape.gradient(y, x)
    with tg.measure() as m:
        assert LEDGER.by("line").keys() == {"(before the measurement)"}
    assert (
        m.live_by_category["user"] >= 1024
        and m.live_by_category["input"] >= 1024
        and "gradient" not in m.live_by_category
    )
    assert m.live_by_category["parameter"] >= 2048
    with tg.memory_budget("1GiB"), tg.measure() as m:
        pass
    assert m.live_by_category["parameter"] >= 2048
    del g, y, v


def test_what_waits_when_a_measurement_ends_is_the_next_ones_where_it_is_asked_for() -> None:
    """Neither the line nor the tape of the first counts then."""
    x, made = c64(np.ones(BIG)), {"tg": tg}
    exec(compile("def f(x):\n    return tg.exp(x * 2.0)", "<made>", "exec"), made)
    f: Any = made["f"]
    with tg.measure(), tg.GradientTape() as tape:
        tape.watch(x)
        kept, other = f(x), f(x)
    with tg.measure(timeline=True):
        before = Counter(LEDGER.by("category"))
        kept.numpy()
        other.numpy()
        assert Counter(LEDGER.by("category")) - before == {"user": 2 * rounded(8 * BIG)}
        assert not any(line.startswith("<made>") for line in LEDGER.by("line"))
    del tape


def test_a_variable_made_after_a_look_at_the_resting_ledger_is_a_parameter() -> None:
    """As after a profile, which is asked for its run when it is over."""
    with tg.measure() as m:
        pass
    before = m.live_by_category.get("parameter", 0)
    with LEDGER.held():
        pass
    v = var64(np.ones(200))
    with tg.measure() as m:
        pass
    assert m.live_by_category["parameter"] == m.peak_by_category["parameter"] == before + 2048
    del v


def test_a_measure_that_an_interrupt_kept_from_being_left_ends_with_its_object() -> None:
    block = tg.measure()
    m = block.__enter__()
    del block
    assert account.current is account.NOBODY and m.now is None


def test_figures_are_those_of_now_whenever_they_are_read() -> None:
    """Sums are made late; nothing of that is seen."""
    x = c64(np.ones(64))
    with tg.measure() as outer, tg.measure() as m:
        base = m.live_bytes
        y = x + 1.0
        assert (m.allocated_bytes, m.peak_bytes - base, m.kernel_runs, m.nodes_run["add"]) == (512, 512, 1, 1)
        del y
        assert (m.live_bytes, m.peak_bytes - base) == (base, 512)
        kept = [x + 1.0 for _ in range(5000)]  # more than wait at most
        assert (m.live_bytes - base, m.nodes_run["add"]) == (5000 * 512, 5001)
        del kept
    assert (m.live_bytes, m.peak_bytes - base, m.allocated_bytes) == (base, 5000 * 512, 5001 * 512)
    assert (outer.peak_bytes, outer.cost) == (m.peak_bytes, m.cost)


def test_what_waits_to_be_summed_is_bounded_where_nothing_is_allocated() -> None:
    x = c64(np.ones((4, 4)))
    with tg.measure() as m:
        for _ in range(3000):
            x.T, x[1]
        assert len(LEDGER._events) < 5000
    assert m.cost == 6000


def test_what_waits_to_be_summed_is_bounded_in_a_walk() -> None:
    waiting = []

    @tg.custom_gradient
    def first(x: tg.Tensor) -> Any:
        return x, lambda ct: (waiting.append(len(LEDGER._events)), ct)[1]

    x = c64(np.ones(4))
    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = first(x)
            for _ in range(3000):
                y = tg.sin(y)
        tape.gradient(y, x)
    assert m.nodes_run == {"sin": 3000, "cos": 3000, "multiply": 3000}
    assert len(waiting) == 1 and waiting[0] < 5000


def test_a_category_that_is_told_when_many_events_wait_is_that_of_what_was_made_just_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = c64(np.ones(100))
    with tg.measure():
        before, y = Counter(LEDGER.by("category")), tg.exp(x)
        monkeypatch.setattr(ledger_module, "_MOST_EVENTS", 0)
        LEDGER.labelled(y._buffer, "gradient")
        assert Counter(LEDGER.by("category")) - before == {"gradient": 1024}


def test_what_is_done_aside_is_in_no_figure_but_what_it_leaves() -> None:
    gone = c64(np.ones(10))
    with tg.measure() as m:
        base, peak = m.live_bytes, m.peak_bytes
        left = LEDGER.aside(lambda: tg.exp(c64(np.ones(100))))
        assert (m.allocated_bytes, m.peak_bytes, m.kernel_runs, m.cost) == (0, peak, 0, 0)
        assert m.live_bytes - base == 1024
        del gone
        assert (m.live_bytes - base, m.peak_bytes) == (512, peak)
    del left


def test_within_a_budget_alone_what_was_there_before_has_its_category() -> None:
    with tg.memory_budget("1GiB"):
        before = LEDGER.by("category").get("parameter", 0)
    v = var64(np.ones(200))
    with tg.memory_budget("1GiB"):
        assert LEDGER.by("category")["parameter"] == before + 2048
    del v


def test_who_holds_the_ledger_sees_what_was_made_just_before() -> None:
    x = c64(np.ones(100))
    with tg.measure():
        y = tg.exp(x)
        with LEDGER.held() as entries:
            found = entries.of(y._buffer)
            assert found is not None and (found.category, found.primitive, found.nbytes) == ("user", "exp", 1024)
    with tg.measure(), LEDGER.held() as entries:
        assert found in entries and found.category == "user"
        del y
    assert found.nbytes == 1024 and found not in LEDGER._entries


def test_a_journal_begins_with_what_is_alive_by_category() -> None:
    """Also what was made while somebody measured before: what it served as then is over."""
    x = c64(np.zeros(1000))
    with tg.measure(), tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.softmax(tg.softmax(x))
        tape.gradient(y, x)
    v = tg.Variable(np.zeros(500), name="v")
    found: Counter[str] = Counter()

    class Census(Journal):
        def census(self, entries: Any) -> None:
            for e in entries:
                found[e.category] += e.nbytes

    journal, m = Census(), Measure(detailed=False)
    LEDGER.open(m)
    LEDGER.write(None)  # what is old has its category now
    late = [tg.exp(x), c64(np.ones(300))]  # just before
    LEDGER.write(journal)
    LEDGER.write(None)
    assert dict(found) == LEDGER.by("category") and found["parameter"] >= v.nbytes
    del late
    LEDGER.close(m)


@pytest.mark.parametrize("size", [4, 40_000])
def test_work_that_is_not_added_up_yet_takes_little_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_MOST_EVENTS", 16)
    x = c64(np.ones(size))

    def run() -> Any:
        waiting = []
        with tg.measure() as m:
            y = x
            for _ in range(60):
                y = tg.matmul(tg.tanh(y)[:4][:, None], c64([[1.0]]))[:, 0] if size == 4 else tg.tanh(y)
                waiting.append(len(LEDGER._work))
        return m, max(waiting)

    few, most = run()
    monkeypatch.undo()
    many, longest = run()
    assert most <= 16 + 4 < longest
    assert (few.nodes_run, few.bytes_moved, few.kernel_runs) == (many.nodes_run, many.bytes_moved, many.kernel_runs)
