"""The backward walk: order of sums, broadcasting, dtypes, rows, operations without gradients, what it may drop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, gradients, no_garbage, same, values, var64
from inside import is_lazy
from peers import Peers, of_all

import tapegrad as tg
from tapegrad import errors
from tapegrad.autodiff import backward
from tapegrad.errors import ReplicatedTargetWarning

BIG = 20_000


@pytest.mark.parametrize(
    ("shapes", "f"),
    [
        (((3, 1), (1, 4)), lambda a, b: a * b),
        (((), (2, 3)), lambda a, b: a / b),
        (((1,), (5,)), lambda a, b: a - b),
        (((2, 1, 3), (4, 1)), lambda a, b: tg.maximum(a, b)),
        (((2, 3), (3,)), lambda a, b: a**b),
        (((0, 3), (1, 3)), lambda a, b: a * b),
        (((1, 1), (1, 1)), lambda a, b: tg.where(a > b, a, b)),
        (((4, 2, 3), (3, 5)), lambda a, b: tg.matmul(a, b)),
        (((2, 3), (3,)), lambda a, b: tg.matmul(a, b)),
    ],
)
def test_what_was_broadcast_is_summed(shapes: tuple, f: Callable, rng: np.random.Generator) -> None:
    arrays = [rng.uniform(0.5, 2.0, s) for s in shapes]
    found = gradients(f, [c64(a) for a in arrays])
    for k, a in enumerate(arrays):
        wanted = np.zeros(a.shape)
        for index in np.ndindex(*a.shape):
            step = np.zeros(a.shape)
            step[index] = 1e-6
            up, down = (
                values(f(*[c64(b + s * step if j == k else b) for j, b in enumerate(arrays)])).sum() for s in (1, -1)
            )
            wanted[index] = (up - down) / 2e-6
        same(found[k], wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("size", [5, BIG])
def test_contributions_add_up_in_the_order_of_the_walk(size: int) -> None:
    x = np.float32(np.linspace(0.1, 1.0, size))
    scales = [np.float32(s) for s in (1e-3, 1.0, 1e3, 0.1)]

    def f(q: tg.Tensor) -> tg.Tensor:
        y = q * 0.0
        for s in scales:
            y = y + q * s
        return y

    (g,) = gradients(f, [tg.asarray(x)])
    wanted = np.ones(size, np.float32) * scales[-1]
    for s in reversed(scales[:-1]):
        wanted = wanted + s
    assert np.array_equal(g, wanted + np.float32(0.0))


def test_dtypes_on_the_way_back() -> None:
    half, single, double = (tg.asarray(np.array([1.5, 2.5], d)) for d in ("float16", "float32", "float64"))
    with tg.GradientTape() as tape:
        tape.watch([half, single, double])
        y = half * single * double + tg.asarray([1, 2]) * half
    found = tape.gradient(y, [half, single, double])
    assert [g.dtype for g in found] == [np.float16, np.float32, np.float64]
    same(found, [[1.5**2 + 1, 2.5**2 + 2], [1.5**2, 2.5**2], [1.5**2, 2.5**2]], rtol=1e-3)
    z = tg.asarray(np.array([1 + 2j, 3 - 1j]))
    with tg.GradientTape() as tape:
        tape.watch(z)
        y = z * z
    same(tape.gradient(y, z), np.conj(2 * z.numpy()))  # TensorFlow's convention


def test_an_operation_without_a_gradient_says_so_only_if_it_is_on_the_path() -> None:
    from tapegrad.core.aval import shaped
    from tapegrad.core.primitive import REGISTRY, general
    from tapegrad.ops.dispatch import barrier

    blind = general("test_blind", impl=lambda xp, x: xp.sinh(x), infer=lambda x: shaped(x.shape, x.dtype, x.device))
    try:
        x, w = c64([1.0, 2.0]), c64([3.0, 4.0])
        with tg.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            y = barrier(blind, x) * w
        with pytest.raises(errors.NoGradientError, match=r"test_blind: has no gradient in operand 0 \(float64\[2\]\)"):
            tape.gradient(y, [x, w])
        same(tape.gradient(y, w), np.sinh([1.0, 2.0]))
        with pytest.raises(errors.NoGradientError, match="test_blind"):
            tg.jvp(lambda q: barrier(blind, q), (x,), (w,))
    finally:
        del REGISTRY["test_blind"]


def test_only_an_operand_on_the_path_needs_a_gradient_of_its_own() -> None:
    """Of two operands one has a rule; the tape follows more than is asked for."""
    from tapegrad.core.primitive import REGISTRY, general
    from tapegrad.ops.dispatch import barrier

    half = general("test_half", impl=lambda xp, x, y: x * y, infer=lambda x, y: x, vjp=[None, lambda ct, x: ct * x])
    try:
        x, y, z = c64([1.0, 2.0]), c64([3.0, 4.0]), c64([5.0, 6.0])
        with tg.GradientTape(persistent=True) as tape:
            tape.watch([x, y, z])
            of = barrier(half, x * 2.0, y) * z
        same(tape.gradient(of, y), [2.0 * 5.0, 4.0 * 6.0])
        with pytest.raises(errors.NoGradientError, match="test_half: has no gradient in operand 0"):
            tape.gradient(of, x)
    finally:
        del REGISTRY["test_half"]


def test_one_and_minus_one_are_rules_of_operations_that_add_and_subtract() -> None:
    from tapegrad.core.primitive import REGISTRY, general
    from tapegrad.ops.dispatch import barrier

    minus = general("test_minus", impl=lambda xp, x, y, z: x - y, infer=lambda x, y, z: x, vjp=[1.0, -1.0, 0.0])
    try:
        xs = c64([1.0, 2.0]), c64([3.0, 5.0]), c64([7.0, 8.0])
        for derivative in (tg.grad, tg.jacobian):
            found = derivative(lambda *xs: tg.sum(barrier(minus, *xs) * xs[0]), (0, 1, 2))(*xs)
            for got, wanted in zip(found, ([-1.0, -1.0], [-1.0, -2.0], [0.0, 0.0]), strict=True):
                same(got, wanted)
    finally:
        del REGISTRY["test_minus"]


def test_rules_of_a_small_operation_run_once_and_then_as_what_they_have_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that the first walk has listed serve the next ones."""
    calls: list[str] = []
    rule = backward.apply_rule

    def noted(node: Any, *rest: Any) -> Any:
        calls.append(node.prim.name)
        return rule(node, *rest)

    monkeypatch.setattr(backward, "apply_rule", noted)
    gradient = tg.grad(lambda x: tg.sum(tg.asinh(x) * 0.75))
    first = gradient(c64(np.linspace(0, 1, 37))).numpy()
    assert "asinh" in calls
    calls.clear()
    same(gradient(c64(np.linspace(0, 1, 37))), first)
    assert "asinh" not in calls


@pytest.mark.parametrize("argnums", [(0, 1, 2), (0, 2), (1,), (2,)])
def test_one_rule_for_all_operands_of_complex_numbers_may_give_none(argnums: tuple[int, ...]) -> None:
    """The rule of ``x**2 z`` is written for the plain transpose, and gives nothing for an operand that is not read."""
    from tapegrad.core.primitive import REGISTRY, general
    from tapegrad.ops.dispatch import barrier

    def pull(ct: Any, x: Any, z: Any, wanted: tuple[int, ...]) -> list[Any]:
        of = (lambda: ct * (2.0 * x * z), lambda: None, lambda: ct * (x * x))
        return [of[i]() for i in wanted]

    prim = general(
        "test_complex_rule", impl=lambda xp, x, y, z: x * x * z, infer=lambda x, y, z: x, vjp=pull, holomorphic=True
    )  # fmt: skip
    try:
        xs = [tg.asarray(np.array([1.0 + 2.0j, -0.5j]) * k) for k in (1, 2, 3)]
        plain = lambda x, y, z: x * x * z + 0.0 * y
        for f, rows in ((tg.real, False), (lambda t: tg.real(t) * tg.imag(t), True)):

            def of(g: Any, f: Any = f, rows: bool = rows) -> Any:
                derivative = tg.jacobian if rows else tg.grad
                return derivative(lambda *a: f(g(*a)) if rows else tg.sum(f(g(*a))), argnums)(*xs)

            for got, want in zip(of(lambda x, y, z: barrier(prim, x, y, z)), of(plain), strict=True):
                same(got, want)
    finally:
        del REGISTRY["test_complex_rule"]


@pytest.mark.parametrize("derivative", [tg.grad, tg.jacobian])
def test_what_one_rule_for_all_operands_gives_is_summed_and_cast_to_each(derivative: Any) -> None:
    """As what rules of single operands give: the rule of a product may leave both to the engine."""
    from tapegrad.core.primitive import REGISTRY, general
    from tapegrad.ops.dispatch import barrier

    def pull(ct: Any, x: Any, y: Any, wanted: tuple[int, ...]) -> list[Any]:
        return [ct * (y, x)[i] for i in wanted]

    prim = general("test_joint_rule", impl=lambda xp, x, y: x * y, infer=lambda x, y: y, vjp=pull)
    try:
        xs = tg.asarray(np.array([[1.0, 2.0, 3.0]], np.float32)), c64([[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
        found = derivative(lambda x, y: tg.sum(barrier(prim, x, y)), (0, 1))(*xs)
        assert [(g.shape, g.dtype.name) for g in found] == [((1, 3), "float32"), ((2, 3), "float64")]
        same(found[0], np.array([[11.0, 13.0, 15.0]], np.float32))
        same(found[1], [[1.0, 2.0, 3.0]] * 2)
    finally:
        del REGISTRY["test_joint_rule"]


def test_only_rules_between_the_sources_and_the_target_are_called() -> None:
    called = list[str]()

    def noted(name: str) -> Callable[[Any], Any]:
        return tg.custom_gradient(lambda q: (q * 1.0, lambda ct: (called.append(name), ct)[1]))

    x, y = c64(2.0), c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch([x, y])
        a = noted("of x")(x)
        b = a * noted("of y")(y)
        noted("of no target")(a)
        target = noted("of b")(b) + noted("of y alone")(y)
    same(tape.gradient(target, x), 3.0)
    assert called == ["of b", "of x"]


@pytest.mark.parametrize("shape", [(4, 3), (160, 130)])
def test_strided_and_broadcast_cotangents(shape: tuple[int, int], rng: np.random.Generator) -> None:
    x, w = c64(rng.normal(size=shape)), var64(rng.normal(size=shape[::-1]))

    def f(q: tg.Tensor) -> tg.Tensor:
        t = tg.permute_dims(tg.tanh(q), (1, 0)) * w
        return tg.sum(t[::2, ::-1] * t[::2, ::-1]) + tg.sum(t[:, 0])

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    gx, gw = values(tape.gradient(y, [x, w]))
    h = np.tanh(x.numpy())
    t = h.T * w.numpy()
    ct = np.zeros_like(t)
    ct[::2] = 2 * t[::2]
    ct[:, 0] += 1
    same([gx, gw], [(ct * w.numpy()).T * (1 - h * h), ct * h.T], rtol=1e-9, atol=1e-9)


def test_a_measured_walk_and_a_recorded_walk_give_the_bits_of_the_plain_one(rng: np.random.Generator) -> None:
    x = c64(rng.normal(size=7))

    def run() -> list:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.tanh(x) * tg.sigmoid(x) / (1.0 + x * x) - tg.exp(-x * x) ** 1.5)
        return values(tape.gradient(y, [x]))

    plain = run()
    with tg.measure():
        assert bits_equal(run(), plain)
    with tg.GradientTape() as outer:
        outer.watch(x)
        assert bits_equal(run(), plain)


def test_the_cotangent_of_a_call_is_computed_before_the_call_takes_memory() -> None:
    """Its rerun would else hold the three factors that the pending cotangent reads."""
    x, w = c64(np.ones((200, 200))), c64(np.eye(200))
    f = tg.recompute_grad(lambda q: tg.tanh(q @ w) @ w)
    with no_garbage(), tg.measure() as m:
        before = m.live_bytes
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
            for _ in range(3):
                y = y * (w @ w)
            y = tg.sum(y)
        tape.gradient(y, x)
    assert m.peak_bytes - before < 4.5 * x.nbytes


def test_what_pends_has_its_bytes_before_a_call_takes_memory_for_its_own() -> None:
    """The cotangent that a call is given is computed by then, and what it was made from may go."""
    filled = []

    @tg.custom_gradient
    def double(x: tg.Tensor) -> tuple[tg.Tensor, Callable[[tg.Tensor], tg.Tensor]]:
        def grad(dy: tg.Tensor) -> tg.Tensor:
            filled.append(not is_lazy(dy))
            return dy * 2.0

        return x * 2.0, grad

    x = tg.asarray(np.full(2 * BIG, 0.5))
    with tg.GradientTape() as tape:
        tape.watch(x)
        z = tg.sum(tg.sin(double(x)))
    assert tape.gradient(z, x).numpy()[0] == 2.0 * np.cos(1.0)
    assert filled == [True]


def of_channels(x: tg.Tensor, scale: tg.Variable, shift: tg.Variable, *, column: bool) -> tg.Tensor:
    turned = (lambda v: tg.reshape(tg.reshape(v, (1, -1)), (-1, 1, 1))) if column else (lambda v: v)
    return tg.relu(x * turned(scale) + turned(shift))


@pytest.mark.parametrize("budget", [False, True])
def test_sums_that_a_reshape_shows_share_the_kernel_of_the_walk(rng: np.random.Generator, budget: bool) -> None:
    """Scale and shift of channels, whose axis is not the last: both gradients and x's are one kernel, as for rows."""
    results = []
    for column in (True, False):
        data = rng.standard_normal((16, 8, 32, 32) if column else (16, 32, 32, 8)).astype("float32")
        x, scale, shift = tg.asarray(data), tg.Variable(np.full(8, 0.5, "f")), tg.Variable(np.ones(8, "f"))
        with tg.memory_budget("1GiB") if budget else contextlib.nullcontext(), tg.GradientTape() as tape:
            tape.watch(x)
            y = of_channels(x, scale, shift, column=column)
            y.numpy()
            with tg.measure() as m:
                found = tape.gradient(y, [x, scale, shift])
        results.append((m.kernel_runs, m.nodes_run["relu"] + m.nodes_run["greater"], m.nodes_run["sum"]))
        positive = data * 0.5 + 1 > 0
        axes, last = ((0, 2, 3), (8, 1, 1)) if column else ((0, 1, 2), (8,))
        np.testing.assert_allclose(found[1].numpy(), (positive * data).sum(axes, dtype="d"), rtol=1e-5, atol=1e-3)
        np.testing.assert_array_equal(found[2].numpy(), positive.sum(axes))
        np.testing.assert_array_equal(found[0].numpy(), positive * np.full(last, 0.5, "f"))
    assert results[0] == results[1] and results[0][0] == 1


@pytest.mark.parametrize("others", [False, True])
def test_rows_stay_rows_through_a_reading_of_their_table(others: bool) -> None:
    """Whether the walk follows all that is watched, or the way to one source alone."""
    table, w = var64(np.ones((4, 2))), var64([1.0, 2.0])
    f = lambda rows: tg.sum(tg.take(rows, [1, 3], axis=0, sparse_grad=True) ** 2)
    with tg.GradientTape() as tape:
        y = f(table.value()) + tg.sum(w)
    g = tape.gradient(y, [table, w] if others else [table])[0]
    assert type(g) is tg.IndexedSlices and g.values.tolist() == [[2.0, 2.0]] * 2 and g.indices.tolist() == [1, 3]


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("reads", [("sparse", "sparse"), ("sparse", "dense"), ("sparse", "sparse", "dense")])
def test_rows_of_several_readings_are_added(reads: tuple[str, ...], dense_first: bool) -> None:
    """As rows while all are; to a whole array where one is."""
    table, start = var64(np.ones((4, 2))), np.arange(8.0).reshape(4, 2)
    table.assign(start)
    with tg.GradientTape() as tape:
        total, wanted = tg.zeros((), dtype="float64"), np.zeros((4, 2))
        for k, read in enumerate(reads[::-1] if dense_first else reads):
            t = table.value()
            if read == "sparse":
                total = total + tg.sum(tg.take(t, [k, 3], axis=0, sparse_grad=True) ** 2)
                wanted[[k, 3]] += 2 * start[[k, 3]]
            else:
                total = total + tg.sum(t * 5.0)
                wanted += 5.0
    g = tape.gradient(total, table)
    assert (type(g) is tg.IndexedSlices) == ("dense" not in reads)
    same(g.to_dense() if isinstance(g, tg.IndexedSlices) else g, wanted)


def test_rows_are_a_whole_array_where_an_array_is_asked_for() -> None:
    g = tg.grad(lambda x: tg.sum(tg.take(x, [1, 3], axis=0, sparse_grad=True) ** 2))(c64(np.ones((4, 2))))
    assert type(g) is tg.Tensor and g.tolist() == [[0.0] * 2, [2.0] * 2] * 2


@pytest.mark.parametrize("foremost", [True, False])
def test_the_first_process_alone_seeds_a_target_that_all_have_and_the_others_take_part(
    foremost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone, x = of_all(Peers(2, foremost), monkeypatch), c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = everyone(x * 3.0)
    same(tape.gradient(y, x), [3.0, 3.0] if foremost else [0.0, 0.0])  # not None: it was pulled with the others'


@pytest.mark.parametrize("count", [1, 2])
def test_a_target_made_of_what_all_have_and_of_its_own_is_in_doubt_among_several_processes_only(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone, x = of_all(Peers(count), monkeypatch), c64([1.0, 2.0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = everyone(x) * x
        same(values([tape.gradient(y, x)]), [[2.0, 4.0]])
    assert [w.category for w in found] == [ReplicatedTargetWarning] * (count - 1)


class Without(Peers):
    """The other processes have recorded nothing that several take part in."""

    def told(self, group: str, mine: Any) -> list[Any]:
        return [mine, *[({}, *mine[1:])] * (self.count - 1)]


def test_processes_that_have_recorded_nothing_together_are_told_with_how_much_each_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone, x = of_all(Without(3), monkeypatch), c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = everyone(everyone(x))
    with pytest.raises(errors.DistributedError, match="rank 0: 2, rank 1: 0, rank 2: 0;"):
        tape.gradient(y, x)


class Reaching(Peers):
    """From the sources of the other processes every operation is reached; each has targets of its own."""

    def replicated(self, node: Any) -> None:  # type: ignore[override]
        return None

    def told(self, group: str, mine: Any) -> list[Any]:
        here, other = dict(mine[2]), dict.fromkeys(mine[2], True)
        reached = [here, *[other] * (self.count - 1)]
        return [(*mine[:2], flags, dict(mine[3]), *mine[4:]) for flags in reached]  # as sent: none is changed later


@pytest.mark.parametrize("count", [1, 2])
def test_an_operation_that_another_process_reaches_is_pulled_where_no_source_leads_to_it(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[Any] = []
    everyone, x, z = of_all(Reaching(count), monkeypatch, pulled), c64([1.0, 2.0]), c64([3.0, 4.0])
    with tg.GradientTape() as tape:
        tape.watch(x), tape.watch(z)
        y = everyone(z) * x
    same(tape.gradient(y, x), [3.0, 4.0])
    assert len(pulled) == count - 1


class Asked(Peers):
    """They note how often they are asked what they reach and want; more often than is sensible is an error."""

    times = 0

    def told(self, group: str, mine: Any) -> list[Any]:
        self.times += 1
        assert self.times < 5, "the walk does not begin"
        return super().told(group, mine)


def test_processes_that_say_the_same_are_asked_once_also_of_what_no_target_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, pulled = Asked(2), list[Any]()
    everyone, x = of_all(peers, monkeypatch, pulled), c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        everyone(x)
        y = x * x
    same(tape.gradient(y, x), [2.0, 4.0])
    assert peers.times == 1 and not pulled


class Wanting(Reaching):
    """The other processes' sources lead to every operation, and from every one to their targets."""

    def told(self, group: str, mine: Any) -> list[Any]:
        every = dict.fromkeys(mine[2], True)
        return [(*mine[:2], dict(mine[2]), dict(mine[3]), *mine[4:]), (*mine[:2], every, every, *mine[4:])]


@pytest.mark.parametrize("within", [contextlib.nullcontext, lambda: tg.memory_budget("1GiB")], ids=["", "a budget"])
def test_what_several_processes_have_recorded_is_kept_though_nobody_asks_for_it(
    within: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tapes of processes would differ by what each has forgotten.  What it was made of is kept, too."""
    pulled = list[Any]()
    everyone, x = of_all(Wanting(2), monkeypatch, pulled), c64([1.0, 2.0])
    with within(), tg.GradientTape() as tape:
        tape.watch(x)
        for _ in range(3):
            everyone(x * 2.0)
        for _ in range(500):
            x * 3.0
        y = x * x
    same(tape.gradient(y, x), [2.0, 4.0])
    assert len(pulled) == 3


@pytest.mark.parametrize("sources", [[], {}, None], ids=repr)
def test_who_asks_for_nothing_takes_part_in_what_others_ask_for(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = list[Any]()
    everyone, x, unused = of_all(Wanting(2), monkeypatch, pulled), c64([1.0, 2.0]), c64([0.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = everyone(x)
    found = tape.gradient(y, unused if sources is None else sources)
    assert found == sources and len(pulled) == 1


@pytest.mark.parametrize("within", [contextlib.nullcontext, lambda: tg.memory_budget("1GiB")], ids=["", "a budget"])
def test_what_operations_among_processes_were_made_of_is_kept_for_later_values(
    within: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many dead values later the way from a value back through such an operation is whole."""
    everyone, x = of_all(Reaching(1), monkeypatch), c64([0.5, 1.0])
    with within(), tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.tanh(everyone(tg.sin(x * 2.0) * 3.0))
        for _ in range(500):
            x * 3.0
    inner = 3.0 * np.sin([1.0, 2.0])
    same(tape.gradient(y, x), (1 - np.tanh(inner) ** 2) * 6.0 * np.cos([1.0, 2.0]))
