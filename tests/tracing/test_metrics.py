"""Figures of a measurement by hand: bytes, their categories, primitives and lines, and work."""

from __future__ import annotations

import _thread
import gc
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from checks import c64, no_garbage, same, values, var64
from cuda_cases import installed
from programs.laws import snapshot

import tapegrad as tg
from tapegrad.remat import policies

pytestmark = pytest.mark.usefixtures("no_collection")

BIG = 20_000
"""Elements of a value that waits for its first reader."""


def rounded(nbytes: int) -> int:
    """Sizes are multiples of 512, as in CuPy's pool."""
    return -(-nbytes // 512) * 512


def grown(before: Any, unit: int = 1) -> dict[str, int]:
    """By how many units each category has grown since a snapshot."""
    more = Counter(snapshot().live_by_category)
    more.subtract(before.live_by_category)
    return {category: n // unit for category, n in more.items() if n // unit}


# Bytes


@pytest.mark.parametrize(("size", "nbytes"), [(0, 0), (1, 512), (512, 512), (513, 1024), (10**6, 1000448)])
def test_sizes_are_rounded_as_cupys_pool_rounds_them(size: int, nbytes: int) -> None:
    with tg.measure() as m:
        before, x = m.live_bytes, tg.asarray(np.zeros(size, np.int8))
        assert m.live_bytes - before == nbytes
    del x


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


def test_figures_of_thousands_of_values_are_exact_whenever_they_are_read() -> None:
    x = c64(np.ones(64))
    x + 1.0  # makes the constant
    with tg.measure() as outer, tg.measure() as m:
        base = m.live_bytes
        kept = [x + 1.0 for _ in range(5000)]
        assert (m.live_bytes - base, m.nodes_run["add"]) == (5000 * 512, 5000)
        del kept
    assert (m.live_bytes, m.peak_bytes - base, m.allocated_bytes) == (base, 5000 * 512, 5000 * 512)
    assert (outer.peak_bytes, outer.cost) == (m.peak_bytes, m.cost)


def test_bytes_allocated_outside_of_blocks_are_counted_to_the_byte() -> None:
    base = snapshot().live_bytes
    held = [c64(np.ones(100)) for _ in range(5)]
    pending = tg.exp(c64(np.ones(BIG)))  # has no bytes yet
    assert snapshot().live_bytes - base == 5 * 1024 + rounded(8 * BIG)
    array = np.asarray(pending)  # filled while nobody counts; its operand goes
    with tg.measure() as m:
        assert m.live_bytes - base == 5 * 1024 + rounded(8 * BIG)
        del array, pending, held[2:]
        assert m.live_bytes - base == 2 * 1024
    with tg.memory_budget("1GiB") as b:
        del held[1:]
        assert b.live_bytes - base == 1024 and b.peak_bytes - base == 2 * 1024
    gc.freeze()  # for good, as before each module: all that is alive would be looked at in each later test
    assert snapshot().live_bytes == base + 1024, "a frozen collector hides nothing"


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
    assert (outer.allocated_bytes, outer.kernel_runs, inner.kernel_runs) == (3072, 3, 1)
    assert inner.live_bytes == frozen == outer.live_bytes - 1024
    block = tg.measure()
    lost = block.__enter__()
    del block, a  # an interrupt has kept it from being left
    tg.exp(x)
    assert lost.allocated_bytes == 0 and lost.live_bytes == frozen + 1024
    del b, c


def test_a_timeline_has_every_change() -> None:
    x, began = c64(np.ones(100)), time.perf_counter()
    with tg.measure(timeline=True) as m:
        base = m.live_bytes
        y = tg.exp(x)
        del y, x
    assert [live - base for _, live, _ in m.samples] == [1024, 0, -1024]
    times = [t for t, _, _ in m.samples]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= time.perf_counter() - began
    x = c64(np.ones(100))
    with tg.measure(timeline=True) as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.recompute_grad(lambda x: tg.exp(tg.exp(x)))(x))
        tape.gradient(y, x)
    assert max(kept for _, _, kept in m.samples) == 3072  # the argument, and both exponentials
    with tg.measure() as without:
        tg.exp(x)
    assert without.samples == []


# Categories, primitives, lines


def test_categories_follow_what_a_value_serves_as() -> None:
    x, w = c64(np.ones(200)), var64(np.ones(200))
    n = rounded(1600)
    x + 1.0, x * 2.0  # makes the constants
    with tg.measure():
        start = snapshot()
        assert start.live_by_category["parameter"] >= n
        mine = x + x
        assert grown(start, n) == {"user": 1}
        given = c64(np.ones(200))
        assert grown(start, n) == {"user": 1, "input": 1}
        with tg.GradientTape() as tape:
            h = tg.exp(x * w)  # the rule of w reads x, that of exp its result
            assert grown(start, n) == {"user": 1, "activation": 2}  # exp's result, and x, an input before
            y = tg.recompute_grad(lambda q: tg.sin(tg.tanh(q)))(h)
            z = y * 2.0
        g = tape.gradient(z, w)
        assert grown(start, n)["gradient"] == 1
        w.assign(g)
        del g, tape, h, y, z
        found = grown(start, n)
        assert found["user"] == 1 and "gradient" not in found and "temporary" not in found
        slot = tg.Variable(mine, category="optimizer")
        assert grown(start, n)["optimizer"] == 1
    del given, mine, slot


def test_values_of_a_rerun_are_rematerialized_while_it_lasts() -> None:
    x, seen = c64(np.ones(200)), list[dict[str, int]]()

    def f(q: Any, is_recomputing: bool) -> Any:
        h = tg.exp(tg.tanh(q))
        if is_recomputing:
            seen.append(snapshot().live_by_category)
        return tg.sin(h)

    with tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.recompute_grad(f)(x)
        assert "rematerialized" not in snapshot().live_by_category
        tape.gradient(y, x)
    assert seen[0]["rematerialized"] == 2 * rounded(1600)
    assert (m.reruns, m.evictions) == (1, 0) and "rematerialized" not in m.live_by_category


def test_a_lazy_value_has_the_category_of_its_readers() -> None:
    x, n = c64(np.ones(BIG)), rounded(8 * BIG)
    x + 1.0  # makes the constant
    with tg.measure():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
        before, other = snapshot(), x + 1.0
        other.numpy()
        assert grown(before) == {"user": n}
        y.numpy()
        assert grown(before) == {"user": n, "activation": n}
    del tape


def test_categories_after_a_block_are_forgotten_but_those_of_variables() -> None:
    x, v = c64(np.ones(100)), var64(np.ones(200))
    before = snapshot()
    with tg.measure():
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.exp(x)
        g = tape.gradient(y, x)
    with tg.measure() as m:
        assert m.peak_by_line == {"(before the measurement)": m.live_bytes}
    assert "gradient" not in m.live_by_category and grown(before) == {"user": 2048}
    late = var64(np.ones(200))
    with tg.memory_budget("1GiB"):
        assert grown(before)["parameter"] == 2048
    del g, y, v, late


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "a budget": lambda: tg.memory_budget("1GiB"),
    "a policy": lambda: tg.memory.policy(policies.save_nothing),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_categories_are_the_same_whoever_manages_memory(block: str) -> None:
    """What a step leaves: gradients, a parameter, and its momentum."""
    x, w = tg.asarray(np.ones(1000, np.float32)), tg.Variable(np.ones(1000, np.float32))
    optimizer = tg.optim.SGD(0.1, momentum=0.9)
    before = snapshot()
    with BLOCKS[block](), tg.measure() as m:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.sin(x) * w)
        g = tape.gradient(y, [x, w])
        optimizer.apply([g[1]], [w])
        del tape, y
    more = Counter(m.live_by_category)
    more.subtract(before.live_by_category)
    assert [more[k] for k in ("gradient", "optimizer", "parameter", "temporary")] == [8192, 4096, 0, 0]


def test_peaks_by_primitive_and_source_line() -> None:
    x = c64(np.ones(1000))
    with tg.measure() as m:
        kept = [tg.exp(x), tg.exp(x)]
        line = tg.sin(x)
    here = f"{__file__}:{test_peaks_by_primitive_and_source_line.__code__.co_firstlineno + 3}"
    n = rounded(8000)
    assert (m.peak_by_primitive["exp"], m.peak_by_primitive["sin"]) == (2 * n, n)
    assert m.peak_by_line[here] == 2 * n
    del kept, line


def test_lines_of_many_functions_of_the_same_instructions() -> None:
    """Functions that take turns, and more than are remembered at once."""
    functions = []
    for number in range(600):
        names: dict[str, Any] = {}
        exec(
            compile("def f(tg, x):\n" + "\n" * (number % 7) + "    return tg.sin(x)", f"<made {number}>", "exec"), names
        )
        functions.append(names["f"])
    x = tg.asarray(np.ones(4, np.float32))
    with tg.measure() as m:
        kept = [f(tg, x) for _ in range(2) for f in functions]
    lines = {line: n for line, n in m.peak_by_line.items() if line.startswith("<made ")}
    assert lines == {f"<made {number}>:{number % 7 + 2}": 1024 for number in range(600)}
    del kept


def test_no_code_of_the_program_is_held_after_a_block() -> None:
    code: Any = compile("y = tg.tanh(x)", "<made>", "exec")
    before = sys.getrefcount(code)
    with no_garbage(), tg.measure():
        exec(code, {"tg": tg, "x": tg.asarray(np.ones(4, np.float32))})
    assert sys.getrefcount(code) == before


def test_bytes_where_no_frame_of_the_program_runs_have_no_line() -> None:
    x = tg.asarray(np.ones(100))
    with tg.measure() as m:
        before = m.kernel_runs
        _thread.start_new_thread(tg.cumulative_sum, (x,))
        until = time.monotonic() + 60
        while m.kernel_runs == before and time.monotonic() < until:
            time.sleep(0.001)
    assert m.peak_by_line["(unknown)"] == 1024


@pytest.mark.parametrize("timeline", [False, True])
def test_the_parts_of_a_peak_are_those_when_it_was_reached(timeline: bool) -> None:
    """Not what the same bytes serve as later, when as many are alive; nor what has gone before or comes after."""
    with tg.measure(timeline=timeline) as m:
        before = m.peak_by_category
        x = c64(np.ones(100))
        v = tg.Variable(x, category="optimizer")
        assert grown(m)["optimizer"] >= 1024
    assert m.peak_by_category == {**before, "input": before.get("input", 0) + 1024}
    with tg.measure(timeline=timeline) as m:
        live, y = m.live_bytes, tg.exp(x)
        del y
        z = tg.sin(c64(np.ones(10)))
        assert m.peak_by_primitive["exp"] == 1024, "known before the block ends"
    assert (m.peak_bytes - live, m.peak_by_primitive["exp"], m.peak_by_primitive.get("sin")) == (1024, 1024, None)
    del v, z


# What a step keeps


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("size", [50, BIG])
@pytest.mark.parametrize("wrap", [tg.recompute_grad, lambda f: f], ids=["recomputed", "plain"])
def test_after_a_step_only_results_are_left(size: int, wrap: Callable) -> None:
    x, w = c64(np.linspace(0, 1, size)), var64(np.ones(size))
    f = wrap(lambda q: tg.tanh(q * w) * q)

    def step() -> list:
        with tg.GradientTape() as tape:
            y = tg.sum(f(f(x)) ** 2.0)
        return tape.gradient(y, [w])

    step()  # makes the constants
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        g = step()
        assert m.live_bytes - base == rounded(x.nbytes)
        peak = m.peak_bytes
        del g
        assert m.live_bytes == base
        step()
        assert (m.live_bytes, m.peak_bytes) == (base, peak)


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
    expected, plain = values(step()), values(plain_step())
    assert all(np.array_equal(p, q) for p, q in zip(expected, plain, strict=True))
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes  # parameters, x, constants
        found = step()
        left = m.live_bytes - base
    # The peak is reached in the gradient of the last block, when nothing has been given back yet.  Alive are
    #   the inputs of blocks 2 to 64 (that of block 1 is x, which was there before)        63 a
    #   the last block's residual: tanh(h @ w1), recomputed                                 1 a
    #   gradients: of the block's result (it is also that of its input, so far),            1 a
    #     and of tanh's result, ct @ w2.T                                                   1 a
    #   results of tanh's rule: 1 - t * t and its product with the cotangent;               2 a + t * t while it lasts
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
    same(found[0], expected[0], rtol=0, atol=0)


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
        assert m.kernel_runs == 1  # both gradients; tanh(x * w) is recomputed inside
        assert m.nodes_run["tanh"] == 1
        assert m.bytes_moved == 2 * n + 2 * n + 2 * 8  # and two numbers: the cotangent, and the 1 of tanh's rule
    t = np.tanh(0.5)
    same([gx, gw], [np.full(BIG, 0.5 * (1 - t * t)), np.full(BIG, 1 - t * t)])


def test_no_work_is_counted_for_views_and_reads() -> None:
    x, v = c64(np.ones((4, 5))), var64(np.ones(3))
    with tg.measure() as m:
        tg.reshape(x, (20,)), tg.permute_dims(x, (1, 0)), x[1:, ::2], v.read(), x.numpy(), tg.stop_gradient(x)
    assert (m.kernel_runs, m.bytes_moved, m.nodes_run, m.allocated_bytes) == (0, 0, Counter(), 0)


def test_costs_are_bytes_written_those_a_barrier_reads_and_the_arithmetic_of_products() -> None:
    x, y = (tg.asarray(np.ones(shape, np.float32)) for shape in ((2, 300), (300, 500)))
    costs = []
    for f in (lambda: tg.tanh(x), lambda: tg.sum(x), lambda: x.T, lambda: x @ y, lambda: x @ y[:, :250]):
        with tg.measure() as m:
            f()
        costs.append(m.cost)
    assert costs[:3] == [1 + 2400, 1 + 4 + 2400, 1]
    moved = 4 * (2 * 300 + 300 * 500 + 2 * 500)
    assert costs[3] > 1 + moved and costs[3] - (1 + moved) == pytest.approx(
        2 * (costs[4] - (1 + moved // 2 + 1200) - 1)
    )


def test_a_copy_that_a_product_makes_of_an_operand_is_work() -> None:
    with installed():
        x, w = (tg.asarray(np.ones(shape), device="cuda") for shape in ((8, 6), (3, 4)))
        with tg.measure() as m:
            x[::2, ::2] @ w
    assert m.kernel_runs == 2 and m.nodes_run == Counter(matmul=1)
    assert m.bytes_moved == (96 + 96) + (96 + 96 + 128)  # the copy, and the product


def test_recomputation_under_a_budget_costs_what_the_values_cost_before() -> None:
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


# As text, and at the end


def test_a_printed_measure_is_one_line() -> None:
    with tg.measure() as m:
        v = tg.Variable(np.ones(1024, np.float32))
        tg.grad(lambda x: tg.sum(tg.recompute_grad(tg.tanh)(x)))(v)
    peak, live = r"<Measure: peak [\d.]+ KiB \(.*\bparameter [\d.]+ KiB\b.*\)", r"live [\d.]+ KiB"
    assert re.fullmatch(rf"{peak}; {live}; kernels: \d+, which moved [\d.]+ KiB; reruns: 1>", str(m)), m


AT_EXIT = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
import tapegrad as tg
(measure := tg.measure(timeline=True)).__enter__()
(budget := tg.memory_budget("1MB")).__enter__()
early.x = x = tg.sin(tg.ones(500))
early.tape = tg.GradientTape(persistent=True)
early.tape.__enter__()
early.tape.watch(x)
for _ in range(400):
    early.x = x = tg.sin(x)
x.numpy()
sys.hold = [m for name, m in sys.modules.items() if name.startswith(("tapegrad", "early"))]
"""


def test_values_that_outlive_our_modules_leave_in_silence() -> None:
    """When the interpreter ends, a module is emptied before one that was imported earlier and holds values of ours."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
