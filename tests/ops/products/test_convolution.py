"""Convolution and its transposes: plain loops, the adjoint identity, blocks, threads, layouts, bytes, messages."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inside import aval_of

import tapegrad as tg
from tapegrad.device import onednn, threads
from tapegrad.device.numerics import conv_cpu, conv_products
from tapegrad.device.numerics.windows import Moves
from tapegrad.errors import BudgetError, ShapeError, TapegradError
from tapegrad.nn import functional as F
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.products.convolution import conv_in_w_p, conv_in_x_p, conv_p
from tapegrad.tensor import from_array
from tapegrad.testing import check_grads

CASES = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 2), Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
    "all at once": ((2, 4, 9, 8), (6, 2, 3, 2), Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)),
    "stride over kernel": ((2, 3, 8), (4, 3, 2), Moves((3,), ((0, 0),), (1,), 1)),
    "depthwise": ((3, 6, 6, 5), (6, 1, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 6)),
    "solid": ((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), Moves((1, 2, 1), ((1, 0), (0, 1), (2, 2)), (1, 1, 2), 1)),
    "1x1": ((3, 4, 3, 3), (5, 4, 1, 1), Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
    "1x1, as many positions as elements": ((2, 3, 17), (5, 3, 1), Moves((2,), ((8, 8),), (1,), 1)),
    "1x1 strided": ((3, 4, 5, 4), (5, 4, 1, 1), Moves((2, 2), ((0, 0), (0, 0)), (1, 1), 1)),
    "kernel meets padding only": ((1, 1, 2), (1, 1, 2), Moves((1,), ((3, 3),), (4,), 1)),
}
TINY = [(64, 1, 500), (8, 3, 50), (300, 10, 10**9)]
"""Sizes of a block, least positions, and multiply-adds of a task, such that even small cases take several blocks."""


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN, which has tests of its own."""
    monkeypatch.setattr(onednn, "library", lambda: None)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    count = threads.get_num_threads()
    yield
    threads.set_num_threads(count)


def blocks(monkeypatch: pytest.MonkeyPatch, block: int, least: int, piece: int) -> None:
    monkeypatch.setattr(conv_cpu, "BLOCK", block)
    monkeypatch.setattr(conv_products, "LEAST", least)
    monkeypatch.setattr(conv_cpu, "PIECE", piece)


def by_loops(x: np.ndarray, w: np.ndarray, moves: Moves) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (0, 0), *moves.padding))
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], moves.dilation)]
    shape = [(n - span) // s + 1 for n, span, s in zip(padded.shape[2:], spans, moves.strides)]
    y = np.zeros((len(x), len(w), *shape))
    channels, each = w.shape[1], len(w) // moves.groups
    for o in range(len(w)):
        mine = slice(o // each * channels, (o // each + 1) * channels)
        for at in np.ndindex(*shape):
            where = [slice(i * s, i * s + n, d) for i, s, n, d in zip(at, moves.strides, spans, moves.dilation)]
            y[(slice(None), o, *at)] = np.sum(padded[(slice(None), mine, *where)] * w[o], axis=tuple(range(1, x.ndim)))
    return y


def three(x: Any, w: Any, g: Any, moves: Moves) -> list[np.ndarray]:
    x, w, g = map(from_array, (x, w, g))
    return [
        barrier(conv_p, x, w, moves=moves).numpy(),
        barrier(conv_in_x_p, g, w, moves=moves, size=x.shape[2:]).numpy(),
        barrier(conv_in_w_p, x, g, moves=moves, kernel=w.shape[2:]).numpy(),
    ]


def operands(case: str, rng: np.random.Generator, dtype: str = "float64") -> tuple[Any, Any, Any, Moves]:
    image, kernel, moves = CASES[case]
    x, w = rng.normal(size=image), rng.normal(size=kernel)
    g = rng.normal(size=by_loops(x, w, moves).shape)
    return x.astype(dtype), w.astype(dtype), g.astype(dtype), moves


@pytest.mark.parametrize("sizes", [None, *TINY])
@pytest.mark.parametrize("case", CASES)
def test_loops_and_the_adjoint_identity(case, sizes, rng, monkeypatch):
    if sizes:
        blocks(monkeypatch, *sizes)
    x, w, g, moves = operands(case, rng)
    y, in_x, in_w = three(x, w, g, moves)
    np.testing.assert_allclose(y, by_loops(x, w, moves), rtol=1e-12, atol=1e-12)
    v, u = rng.normal(size=x.shape), rng.normal(size=w.shape)
    np.testing.assert_allclose(np.sum(in_x * v), np.sum(by_loops(v, w, moves) * g), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(np.sum(in_w * u), np.sum(by_loops(x, u, moves) * g), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("case", ["all at once", "depthwise"])
def test_bits_depend_neither_on_threads_nor_on_layout(case, dtype, rng, monkeypatch):
    blocks(monkeypatch, 64, 1, 50)
    x, w, g, moves = operands(case, rng, dtype)
    found = []
    for count in (1, 2, 5):
        threads.set_num_threads(count)
        found.append(three(x, w, g, moves))
    strided = [np.repeat(a, 2, axis=-1)[..., ::2] for a in (x, w, g)]
    turned = [np.ascontiguousarray(a.swapaxes(0, -1)).swapaxes(0, -1) for a in (x, w, g)]
    found += [three(*strided, moves), three(*turned, moves)]
    for other in found[1:]:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found[0], other, strict=True))


def test_half_precision_is_added_up_in_single():
    x = np.full((1, 4096, 1, 1), 0.01, "float16")
    w = np.ones((1, 4096, 1, 1), "float16")
    moves = CASES["1x1"][2]
    y, _, _ = three(x, w, np.ones((1, 1, 1, 1), "float16"), moves)
    np.testing.assert_array_equal(y.ravel(), np.float16(4096 * np.float32(np.float16(0.01))))


def test_parts_of_a_sum_in_half_precision_are_added_up_in_single(monkeypatch):
    blocks(monkeypatch, 1, 1, 10**9)
    parts = np.full(65, 2.0**-12, "float16")  # each is lost beside a 1 in half precision
    parts[0] = 1
    ones = np.ones((65, 1, 1), "float16")
    x, moves = parts[:, None, None], Moves((1,), ((0, 0),), (1,), 1)
    _, _, in_w = three(x, ones[:1], ones, moves)
    assert in_w.item() == 1 + 2.0**-6
    wide, taps = np.ones((1, 1, 65), "float16"), parts[None, None, ::-1]  # the last tap meets an element first
    _, in_x, _ = three(wide, taps, np.ones((1, 1, 129), "float16"), moves._replace(padding=((64, 64),)))
    np.testing.assert_array_equal(in_x, np.full((1, 1, 65), 1 + 2.0**-6))


@pytest.mark.parametrize("case", CASES)
def test_the_work_is_the_same_in_each_direction(case, rng):
    x, w, g, moves = operands(case, rng)
    x, w, g = map(from_array, (x, w, g))
    avals = [aval_of(t) for t in (x, w, g)]
    wanted = 2 * g.size * w.size // w.shape[0]
    assert conv_p.flops(avals[0], avals[1], moves=moves) == wanted
    assert conv_in_x_p.flops(avals[2], avals[1], moves=moves, size=x.shape[2:]) == wanted
    assert conv_in_w_p.flops(avals[0], avals[2], moves=moves, kernel=w.shape[2:]) == wanted


def test_complex_gradients_follow_the_convention(rng):
    x, w = (rng.normal(size=s) + 1j * rng.normal(size=s) for s in ((1, 1, 4), (1, 1, 2)))
    g = tg.grad(lambda x: tg.sum(tg.real(F.conv1d(x, w))))(x)
    ones = np.ones((1, 1, 3))
    np.testing.assert_allclose(g.numpy()[0, 0], np.convolve(ones[0, 0], w[0, 0].conj()))


@pytest.mark.parametrize("case", ["all at once", "stride over kernel", "depthwise"])
def test_derivatives_to_second_order(case, rng):
    x, w, _, moves = operands(case, rng)
    check_grads(lambda x, w: barrier(conv_p, x, w, moves=moves), [x, w], order=2)


def test_a_whole_im2col_is_never_made(rng):
    x, w = rng.normal(size=(8, 16, 64, 64)).astype("float32"), rng.normal(size=(16, 16, 5, 5)).astype("float32")
    g, moves = np.ones((8, 16, 64, 64), "float32"), Moves((1, 1), ((2, 2), (2, 2)), (1, 1), 1)
    columns = 25 * x.nbytes
    threads.set_num_threads(2)
    three(x, w, g, moves)
    tracemalloc.start()
    try:
        three(x, w, g, moves)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < columns / 3


def test_a_rerun_gives_the_same_bits(rng):
    x = tg.asarray(rng.normal(size=(4, 3, 12, 12)).astype("float32"))
    w = tg.asarray(rng.normal(size=(5, 3, 3, 3)).astype("float32"))
    found = []
    for wrap in (lambda f: f, tg.recompute_grad):
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            y = wrap(lambda x, w: tg.tanh(F.conv2d(x, w, padding=1)))(x, w)
            loss = tg.sum(y * y)
        found.append([g.numpy().tobytes() for g in tape.gradient(loss, [x, w])])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("padding", "expected"),
    [("valid", (3, 2)), ("same", (4, 3)), (1, (4, 3)), ((1, 0), (4, 2)), (((0, 1), (2, 0)), (3, 3))],
)
def test_padding(padding, expected, rng):
    x, w = rng.normal(size=(1, 2, 7, 6)), rng.normal(size=(3, 2, 3, 3))
    assert F.conv2d(x, w, stride=2, padding=padding).shape == (1, 3, *expected)


def test_the_odd_element_of_same_padding_is_after_the_image(rng):
    x, w = rng.normal(size=(1, 1, 5, 6)), rng.normal(size=(1, 1, 2, 4))
    y = F.conv2d(x, w, padding="same", dilation=(3, 1))
    np.testing.assert_array_equal(y.numpy(), F.conv2d(x, w, padding=((1, 2), (1, 2)), dilation=(3, 1)).numpy())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.conv2d(np.ones((3, 5)), np.ones((2, 3, 3, 3))), r"conv2d: wanted input .*got \(3, 5\)"),
        (lambda: F.conv2d(np.ones((2, 3, 5, 5)), np.ones((2, 3, 3))), r"conv2d: wanted weight .*got \(2, 3, 3\)"),
        (lambda: F.conv1d(np.ones((2, 3, 5)), np.ones((2, 4, 3))), r"3 channels, but weight \(2, 4, 3\).*wants 4"),
        (lambda: F.conv1d(np.ones((2, 4, 5)), np.ones((3, 2, 3)), groups=2), "3 outputs .* 2 groups"),
        (lambda: F.conv1d(np.ones((2, 4, 2)), np.ones((3, 4, 3))), r"covers \(3,\).*input is \(2,\); pad more"),
        (lambda: F.conv1d(np.ones((2, 4, 5)), np.ones((3, 4, 3)), padding=-1), "padding, got -1"),
        (lambda: F.conv1d(np.ones((2, 4, 5)), np.ones((3, 4, 3)), stride=0), "at least 1, for stride, got 0"),
        (lambda: F.conv1d(np.ones((2, 4, 5)), np.ones((3, 4, 3)), dilation=(1, 2)), r"for dilation, got \(1, 2\)"),
        (lambda: F.conv1d(np.ones((2, 4, 5)), np.ones((3, 4, 3)), bias=np.ones(2)), r"wanted bias \(3,\).*got \(2,\)"),
        (lambda: F.conv_transpose2d(np.ones((1, 2, 3, 3)), np.ones((3, 1, 2, 2))), r"wanted weight \(2, outputs"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_an_unknown_padding_is_refused():
    with pytest.raises(TapegradError, match="'full'"):
        F.conv1d(np.ones((1, 1, 3)), np.ones((1, 1, 1)), padding="full")


def test_integers_become_floats():
    assert F.conv1d(np.ones((1, 1, 3), "int64"), np.ones((1, 1, 2), "int64")).dtype == np.float64


OPTIONS = [
    {}, {"padding": 1}, {"padding": "same", "dilation": 2}, {"stride": 2, "padding": 1}, {"groups": 2},
    {"stride": 3, "dilation": 2, "padding": 2, "groups": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_like_torch(dims, options, rng):
    torch = pytest.importorskip("torch")
    groups = options.get("groups", 1)
    arrays = [rng.normal(size=(2, 4, *(9, 8, 7)[:dims])), rng.normal(size=(6, 4 // groups, *(3, 2, 2)[:dims])),
              rng.normal(size=6)]  # fmt: skip
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    z = getattr(torch.nn.functional, f"conv{dims}d")(*theirs, **options)
    ours = [tg.asarray(a) for a in arrays]
    with tg.GradientTape() as tape:
        tape.watch(ours)
        y = getattr(F, f"conv{dims}d")(*ours, **options)
    ct = rng.normal(size=y.shape)
    z.backward(torch.tensor(ct))
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-10, atol=1e-12)
    for g, t in zip(tape.gradient(y, ours, output_gradients=tg.asarray(ct)), theirs, strict=True):
        np.testing.assert_allclose(g.numpy(), t.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_conv_transpose_is_the_transpose(rng):
    x, w = rng.normal(size=(2, 4, 5, 4)), rng.normal(size=(4, 3, 3, 2))
    y = F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=(1, 0), dilation=(1, 2))
    assert y.shape == (2, 3, 10, 7)
    v = rng.normal(size=y.shape)
    back = F.conv2d(v, w, stride=2, padding=1, dilation=(1, 2))
    np.testing.assert_allclose(np.sum(y.numpy() * v), np.sum(back.numpy() * x), rtol=1e-11)


@pytest.mark.parametrize("lead", [((2, 3), ()), ((), (2, 3)), ((2, 3), (2, 3)), ((3,), (2, 3)), ((2, 1), (1, 3))])
@pytest.mark.parametrize("case", ["all at once", "depthwise", "stride over kernel"])
def test_axes_in_front_are_calls_of_their_own(case, lead, rng):
    """Of each operand some of them, which broadcast; the three convolutions call by call say what is right."""
    x, w, g, moves = operands(case, rng)
    several = lambda a, shape: a + rng.normal(size=(*shape, *a.shape))
    pairs = {
        conv_p: ((x, w), {}),
        conv_in_x_p: ((g, w), {"size": x.shape[2:]}),
        conv_in_w_p: ((x, g), {"kernel": w.shape[2:]}),
    }
    for prim, (pair, options) in pairs.items():
        a, b = (several(each, shape) for each, shape in zip(pair, lead))
        y = barrier(prim, from_array(a), from_array(b), moves=moves, **options).numpy()
        assert y.shape[: -x.ndim] == (2, 3)
        a, b = (np.broadcast_to(v, (2, 3, *v.shape[-x.ndim :])) for v in (a, b))
        for i in np.ndindex(2, 3):
            one = barrier(prim, from_array(a[i].copy()), from_array(b[i].copy()), moves=moves, **options).numpy()
            np.testing.assert_allclose(y[i], one, rtol=1e-11, atol=1e-12)


def test_axes_in_front_that_do_not_broadcast_are_refused(rng):
    x, w, _, moves = operands("plain", rng)
    with pytest.raises(ShapeError, match="conv"):
        barrier(conv_p, from_array(np.stack([x, x])), from_array(np.stack([w, w, w])), moves=moves)


def test_a_jacobian_runs_all_rows_at_once(rng, monkeypatch):
    x, w = rng.normal(size=(2, 2, 5, 4)), rng.normal(size=(3, 2, 3, 2))
    f = lambda x, w: F.conv2d(x, w, stride=2, padding=1)
    calls = []
    for name in ("in_image", "in_kernel"):
        prepare = getattr(conv_cpu, name)

        def counted(*args, name=name, prepare=prepare):
            prepared = prepare(*args)
            return prepared._replace(run=lambda: (calls.append(name), prepared.run()))

        monkeypatch.setattr(conv_cpu, name, counted)
    by_x = tg.jacobian(lambda x: f(x, w))(tg.asarray(x)).numpy()
    by_w = tg.jacobian(lambda w: f(x, w))(tg.asarray(w)).numpy()
    assert calls == ["in_image", "in_kernel"]
    unit = np.zeros_like(x)
    unit[1, 0, 2, 3] = 1
    np.testing.assert_allclose(by_x[..., 1, 0, 2, 3], f(unit, w).numpy(), atol=1e-12)
    unit = np.zeros_like(w)
    unit[2, 1, 0, 1] = 1
    np.testing.assert_allclose(by_w[..., 2, 1, 0, 1], f(x, unit).numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "output_padding": 1}, {"stride": 2, "padding": 1, "output_padding": 1},
     {"dilation": 3, "output_padding": 2, "padding": 1}, {"stride": 2, "groups": 2}],
    ids=str,
)  # fmt: skip
def test_transposed_convolutions_undo_nothing_but_are_transposes(dims, options, rng):
    """``<conv_transpose(x), v> = <x, conv(v)>`` for every v of the result's size that the convolution covers."""
    kernel, size, groups = (3, 2, 2)[:dims], (4, 3, 3)[:dims], options.get("groups", 1)
    x, w = rng.normal(size=(2, 4, *size)), rng.normal(size=(4, 6 // groups, *kernel))
    y = getattr(F, f"conv_transpose{dims}d")(x, w, **options)
    more = options.get("output_padding", 0)
    s, p, d = (options.get(k, v) for k, v in (("stride", 1), ("padding", 0), ("dilation", 1)))
    assert y.shape[2:] == tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + more for n, k in zip(size, kernel))
    v = rng.normal(size=y.shape)
    around = tuple((p, max(0, p - more)) for _ in size)
    inner = tuple(slice(None, n - max(0, more - p)) for n in y.shape[2:])
    back = getattr(F, f"conv{dims}d")(v[(..., *inner)], w, stride=s, padding=around, dilation=d, groups=groups).numpy()
    np.testing.assert_allclose(np.sum(y.numpy() * v), np.sum(back * x), rtol=1e-10)


def test_an_image_without_the_axis_n(rng):
    x, w, b = rng.normal(size=(3, 6, 5)), rng.normal(size=(4, 3, 2, 2)), rng.normal(size=4)
    np.testing.assert_array_equal(F.conv2d(x, w, b, 2).numpy(), F.conv2d(x[None], w, b, 2).numpy()[0])
    w = rng.normal(size=(3, 4, 2, 2))
    np.testing.assert_array_equal(F.conv_transpose2d(x, w, b).numpy(), F.conv_transpose2d(x[None], w, b).numpy()[0])


def test_what_a_transposed_convolution_refuses():
    x, w = np.ones((1, 2, 3)), np.ones((2, 1, 2))
    for options, message in (
        ({"output_padding": 1}, "smaller than the stride"),
        ({"padding": 5}, "leaves nothing"),
        ({"groups": 3}, "groups"),
    ):
        with pytest.raises(ShapeError, match=message):
            F.conv_transpose1d(x, w, **options)


def _steps(images: int = 2) -> Any:
    """A function that makes a convolution and both gradients beside values that a budget can drop."""
    rng = np.random.default_rng(0)
    x, w = (tg.asarray(rng.normal(size=s).astype("float32")) for s in ((images, 4, 16, 16), (8, 4, 3, 3)))

    def run() -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            h = x
            for _ in range(30):
                h = tg.softmax(h)
            y = tg.nn.functional.conv2d(h, w, padding=1)
            loss = tg.sum(y * y)
        return tape.gradient(loss, [x, w])

    return run


def test_scratch_is_counted_and_has_its_place_in_the_budget() -> None:
    """Columns of 36 rows and products of 8, of 512 positions, and the kernel's; values are dropped for them."""
    run = _steps()
    with tg.measure() as plain:
        wanted = [t.numpy() for t in run()]
    columns = (4 * 9 + 8) * 2 * 256 * 4
    assert columns <= plain.scratch_bytes <= 2 * columns
    with tg.memory_budget(plain.peak_bytes) as budget:
        found = [t.numpy() for t in run()]
    assert budget.evictions > 0, "the budget has room for the values and none for the scratch"
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(BudgetError, match="scratch"), tg.memory_budget(columns):
        run()
