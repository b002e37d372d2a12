"""Evaluation: what runs when, how often, in which order values are freed, and what failures leave behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from checks import c64, no_garbage, same

import tapegrad as tg
from tapegrad import errors

BIG = 40_000


@pytest.fixture
def x() -> tg.Tensor:
    return c64(np.linspace(-1, 1, BIG))


def test_only_large_elementwise_operations_wait(x: tg.Tensor) -> None:
    positive, eye, matrix = x > 0, c64(np.eye(4)), tg.reshape(x, (BIG // 4, 4))
    positive.numpy(), x + 1.0, tg.where(positive, x, 0.0)  # constants are there
    with tg.measure() as m:
        waiting = [tg.exp(x), x + 1.0, tg.where(positive, x, 0.0), tg.astype(x, "float32")]
        views = [x[5:], tg.reshape(x, (4, -1)), tg.permute_dims(matrix, (1, 0))]
        assert m.kernel_runs == m.allocated_bytes == 0
        for count, f in enumerate((tg.exp, tg.sum, lambda x: tg.matmul(matrix, eye), tg.cumulative_sum), 1):
            f(x[:10] if count == 1 else x)
            assert m.kernel_runs == count
        for count, y in enumerate(waiting, 5):
            y.numpy()
            assert m.kernel_runs == count
    assert all(np.shares_memory(view.numpy(), x.numpy()) for view in views)


def test_a_barrier_or_a_view_evaluates_the_value_it_reads(x: tg.Tensor) -> None:
    with tg.measure() as m:
        y = tg.exp(x)
        z = tg.reshape(y, (BIG // 4, 4))
        w = tg.exp(y)
        tg.matmul(tg.reshape(w, (BIG // 4, 4)), c64(np.eye(4)))
        assert m.nodes_run == Counter(exp=2, matmul=1)
        assert np.shares_memory(y.numpy(), z.numpy()) and w.numpy() is not None
    assert m.nodes_run == Counter(exp=2, matmul=1)


def test_a_reduction_takes_its_region_along(x: tg.Tensor) -> None:
    tg.tanh(x) * 2.0 + 1.0  # makes the constants
    with tg.measure() as m:
        base = m.live_bytes
        total = tg.sum(tg.tanh(x) * 2.0 + 1.0)
        assert m.kernel_runs == 1 and m.live_bytes - base == 512 and m.peak_bytes - base <= 2 * 512
    assert m.nodes_run == Counter(tanh=1, multiply=1, add=1, sum=1)
    same(total, (np.tanh(x.numpy()) * 2 + 1).sum(), rtol=1e-9)


def test_a_mean_on_a_cpu_waits_for_nobody_and_is_the_users_own(x: tg.Tensor) -> None:
    with tg.measure() as m:
        y = tg.mean(x)  # noqa: F841  # alive when the block ends
    assert m.live_by_category["user"] == 512 and "temporary" not in m.live_by_category


def test_a_view_of_a_value_that_waits_is_filled_with_the_values_array(x: tg.Tensor) -> None:
    with tg.measure() as m:
        before = m.live_bytes
        y = tg.exp(x)
        same_y = tg.real(y)
        same(same_y, np.exp(x.numpy()))
        y.numpy()
        assert m.kernel_runs == 1 and m.live_bytes - before <= x.nbytes + 512
    assert m.nodes_run == Counter(exp=1)


def test_a_small_operation_moves_the_bytes_that_lie_there() -> None:
    x, two = c64(np.ones(1000)), tg.broadcast_to(c64([2.0]), (1000,))
    three = tg.broadcast_to(c64([3.0]), (1000,))
    yes, always = tg.asarray(np.ones(1000, bool)), tg.broadcast_to(tg.asarray(np.array([True])), (1000,))
    for f, wanted in [(lambda: x * two, 16_008), (lambda: two * x, 16_008), (lambda: two * two, 8_008),
                      (lambda: x * (x + 1.0), 16_000 + 8 + 24_000), (lambda: x * x, 16_000),
                      (lambda: tg.where(yes, x, x), 17_000), (lambda: tg.where(yes, x, two), 17_008),
                      (lambda: tg.where(always, two, three), 8000 + 1 + 16)]:  # fmt: skip
        with tg.measure() as m:
            f()
        assert m.bytes_moved == wanted


def test_a_small_operation_on_a_view_costs_what_it_does_on_what_owns_its_bytes() -> None:
    whole = c64(np.linspace(0.1, 1.0, 6))
    found = []
    for operand in (whole[1:], c64(whole.numpy()[1:])):
        with tg.measure() as m:
            cost = m.cost
            tg.exp(operand), operand * operand, operand + whole[:5]
        found.append((m.cost - cost, m.nodes_run))
    assert found[0] == found[1] and found[0][0] > 0


@pytest.mark.parametrize("way", [nullcontext, tg.measure])
def test_a_small_operation_evaluates_operands_that_wait(way: Any) -> None:
    """Truth values are small where numbers as many are not; what waits is the first operand, the second, both."""
    x = np.linspace(-1, 1, 20_000)
    for what, operation, wanted in (
        ("one", lambda y: tg.isnan(y), np.isnan(x)),
        ("greater", lambda y: y > 0.0, x > 0.0),
        ("two", lambda y: tg.greater(c64(-x), y), -x > x),
        ("one twice", lambda y: y < y, x < x),
    ):
        with way() as m:
            y = c64(x) * 1.0
            same(operation(y), wanted)
        moved = 16 * x.size + 8 + 9 * x.size  # the product, with its number, and what reads one array
        assert m is None or m.bytes_moved == moved + {"greater": 8, "two": 8 * x.size}.get(what, 0)


def test_gradients_asked_for_together_share_a_kernel(x: tg.Tensor) -> None:
    with tg.GradientTape() as tape:
        tape.watch([x, w := c64(np.full(BIG, 0.5))])
        y = tg.tanh(x * w)
    with tg.measure() as m:
        g = tape.gradient(y, [x, w])
    assert m.kernel_runs == 1 and m.nodes_run["tanh"] == 1
    t = 1 - np.tanh(x.numpy() * 0.5) ** 2
    same(g, [t * 0.5, t * x.numpy()])


def test_a_value_read_again_is_computed_once(x: tg.Tensor) -> None:
    y = tg.tanh(x)
    with tg.measure() as m:
        y.numpy(), (y + 1.0).numpy(), y.numpy(), (y * 2.0).numpy()
    assert m.nodes_run["tanh"] == 1


def test_a_pending_value_keeps_its_operands_and_a_finished_one_forgets_them() -> None:
    with tg.measure() as m:
        base = m.live_bytes
        x = c64(np.linspace(-1, 1, BIG))
        y = tg.exp(x)
        n, _ = m.live_bytes - base, x.numpy()[:0]
        del x, _
        assert m.live_bytes - base == n >= 8 * BIG
        y.numpy()
        assert m.live_bytes - base == n, "the result alone"
        del y
        assert m.live_bytes == base


def test_unread_lazy_values_cost_nothing(x: tg.Tensor) -> None:
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        for _ in range(20):
            tg.exp(x)
        assert (m.kernel_runs, m.live_bytes, m.allocated_bytes) == (0, base, 0)
    assert m.nodes_run == Counter()


def test_a_deep_lazy_chain_and_a_wide_one() -> None:
    x = c64(np.full(BIG, 0.5))
    with no_garbage():
        y = x
        for _ in range(1000):
            y = y * 0.5 + 0.5
        same(y[:3], np.full(3, 1.0))
        parts = [x * float(k) for k in range(100)]
        total = parts[0]
        for p in parts[1:]:
            total = total + p
        same(total[:3], np.full(3, 0.5 * 4950))
        del y, parts, total, p


def test_a_failing_kernel_leaves_the_value_pending_and_no_garbage(x: tg.Tensor) -> None:
    y = tg.log(x)  # of negative numbers, too
    for count in (1, 2):
        threads = tg.get_num_threads()
        tg.set_num_threads(count)
        try:
            with no_garbage(), tg.measure() as m:
                base = m.live_bytes
                for _ in range(2):
                    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
                        y.numpy()
                assert m.live_bytes == base and m.kernel_runs == 0
        finally:
            tg.set_num_threads(threads)
    with np.errstate(invalid="ignore"):
        assert np.isnan(y.numpy()[:10]).all()


def test_threads_evaluate_one_value_once(x: tg.Tensor) -> None:
    y = tg.tanh(tg.exp(x) * 0.5)
    found: list[np.ndarray] = []
    with tg.measure() as m:
        threads = [threading.Thread(target=lambda: found.append(y.numpy())) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert m.nodes_run["tanh"] == 1 and len(found) == 8
    assert all(np.array_equal(f, found[0]) for f in found)


def test_a_barrier_has_room_before_it_runs() -> None:
    x = c64(np.ones((200, 200)))
    with tg.measure() as m, pytest.raises(tg.errors.BudgetError), tg.memory_budget(m.live_bytes + x.nbytes // 2):
        x @ x
    assert m.kernel_runs == 0


def test_a_region_has_room_for_all_that_it_stores_before_it_runs(x: tg.Tensor) -> None:
    with tg.GradientTape() as tape:
        tape.watch([x, w := c64(np.ones(BIG))])
        y = tg.sin(x * w)
    with tg.measure() as m, tg.memory_budget(m.live_bytes + 2 * x.nbytes - 1):
        with pytest.raises(errors.BudgetError, match=r"multiply\+multiply needs") as failure:
            tape.gradient(y, [x, w])
        assert m.kernel_runs == 0 and failure.value.needed_bytes >= m.live_bytes + 2 * x.nbytes


def test_a_view_takes_a_copy_only_where_it_has_to_and_says_where_there_is_no_room() -> None:
    """The copy that a reshape takes of a view with gaps is no view that needs nothing, whoever counts."""
    x = c64(np.arange(6.0).reshape(2, 3))
    for block in (nullcontext, tg.measure):
        with block():
            with tg.measure() as m:
                y = tg.permute_dims(x, (1, 0))
                y[1:][0], tg.permute_dims(y[1:], (1, 0)), tg.reshape(x, (3, 2))  # views of views with gaps, and of all
                assert m.allocated_bytes == 0
                copy = tg.reshape(y, (6,))
                assert m.allocated_bytes == 512
            assert copy.numpy().tolist() == [0, 3, 1, 4, 2, 5]
            wide = tg.broadcast_to(x[:1], (2**50, 3))
            with pytest.raises(errors.DeviceMemoryError, match="no room for reshape"):
                tg.reshape(wide, (-1,))


def test_a_small_piece_of_a_large_array_is_a_copy_within_a_budget_alone() -> None:
    """There a view would keep the whole array from being dropped; a large piece is a view anywhere."""
    x = c64(np.ones(100_000))
    for within, copied in ((nullcontext(), False), (tg.measure(), False), (tg.memory_budget("1GiB"), True)):
        with within:
            small, large = x[:100], x[:50_000]
        of = [np.shares_memory(t.numpy(), x.numpy()) for t in (small, large)]
        assert of == [not copied, True]


def test_a_view_needs_no_room() -> None:
    """Of what does not lie in order, too, unless it has to be copied."""
    x = c64(np.ones((200, 200)))[:, ::2]
    gc.collect()  # or the budget finds what earlier tests have left
    with tg.measure() as m, tg.memory_budget(m.live_bytes):
        views = tg.permute_dims(x, (1, 0)), x[1:], tg.real(x)
        with pytest.raises(errors.BudgetError):
            tg.reshape(x, (-1,))
    assert all(np.shares_memory(t.numpy(), x.numpy()) for t in views)


def test_values_a_rerun_computes_late_may_be_dropped_once_they_are_there() -> None:
    """A chain of results that rules read, which are made when the walk asks for the last one: not all fit at once."""
    x, w = c64(np.linspace(-1, 1, 2500).reshape(50, 50)), c64(np.eye(50))

    def chain(y: tg.Tensor) -> tg.Tensor:
        for _ in range(12):
            y = tg.softmax(y @ w)
        return y

    def gradient() -> np.ndarray:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.recompute_grad(chain)(x))
        return tape.gradient(y, x).numpy(copy=True)

    plain = gradient()
    with tg.measure() as m, tg.memory_budget(m.live_bytes + 7 * 20_480):
        assert np.array_equal(gradient(), plain)
    assert m.evictions and m.restored
