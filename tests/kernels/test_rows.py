"""The kernels that walk along rows against the NumPy implementations of the same primitives."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tapegrad.device import cuda_types
from tapegrad.device.kernel import options
from tapegrad.errors import IndexingError
from tapegrad.ops.rows.cross_entropy import cross_entropy_p, cross_entropy_vjp_p
from tapegrad.ops.rows.normalization import layer_norm_p, layer_norm_vjp_gamma_p, layer_norm_vjp_p, layer_norm_vjp_x_p
from tapegrad.ops.rows.softmax import log_softmax_p, log_softmax_vjp_p, softmax_p, softmax_vjp_p

pytestmark = pytest.mark.sampled(1 / 6)

WIDTHS = [1, 2, 3, 31, 32, 33, 1023, 1024, 1025, 5000, 5001, 9000]
FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
HALVES = {np.dtype(np.float16): 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2.0**-7}
EPS = 0.1


def _draw(seed, shape, dtype, scale=2.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def _misaligned(x):
    room = np.empty(x.size + 1, x.dtype)
    room[1:] = x.reshape(-1)
    return room[1:].reshape(x.shape)


def _wide(x):
    """Half precision as the engine computes it, else in extended precision."""
    return x.astype(np.float64) if x.dtype.kind in "fV" else x


def _cases(rows, width, dtype, leads=()):
    """Each primitive with operands, the shape of its result, and its parameters."""
    x, g = _draw(1, (*rows, width), dtype), _draw(2, (*leads, *rows, width), dtype)
    gamma, beta = _draw(3, (width,), dtype), _draw(4, (width,), dtype)
    labels = np.random.default_rng(5).integers(0, max(1, width), rows)
    y = (np.exp(_wide(x)) / np.exp(_wide(x)).sum(-1, keepdims=True)).astype(dtype)
    log_y = np.log(np.maximum(_wide(y), 1e-30)).astype(dtype)
    if not leads:
        yield softmax_p, (x,), g.shape, {}
        yield log_softmax_p, (x,), g.shape, {}
        yield layer_norm_p, (x, gamma, beta), g.shape, {"eps": EPS}
        if width:
            yield cross_entropy_p, (x, labels), x.shape[:-1], {}
    yield softmax_vjp_p, (y, g), g.shape, {}
    yield log_softmax_vjp_p, (log_y, g), g.shape, {}
    yield layer_norm_vjp_x_p, (x, gamma, g), g.shape, {"eps": EPS}
    yield layer_norm_vjp_gamma_p, (x, g), (*leads, width), {"eps": EPS}
    yield layer_norm_vjp_p, (x, gamma, g), (*leads, x.size + 2 * width), {"eps": EPS}
    if width:
        yield cross_entropy_vjp_p, (x, labels, g[..., 0]), g.shape, {}


def _run(device, prim, operands, shape, params):
    out = device.empty(shape, operands[0].dtype)
    prim.cuda(device, *operands, out=out, **params)
    return out


def _expected(prim, operands, shape, params):
    """What the NumPy implementation gives in float64, in the operands' dtype."""
    out = np.zeros(shape)
    prim.impl(np, *map(_wide, operands), out=out, **params)
    return out


def _compare(prim, found, expected, operands):
    dtype, count = found.dtype, operands[0].size
    size = np.abs(expected).max(initial=1.0)
    if dtype in HALVES:  # one rounding, and that of sums before it
        np.testing.assert_allclose(_wide(found), expected, rtol=HALVES[dtype], atol=size * 3e-6, err_msg=prim.name)
    else:
        tolerance = 1e-12 if dtype == np.float64 else 1.5e-6
        tolerance *= max(1.0, count**0.5 / 100)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * size, err_msg=prim.name)


@pytest.mark.sampled(1 / 5)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_values(emulated, dtype, width):
    if width > 2000 and dtype is np.float16:
        pytest.skip("as bfloat16")
    rows = (2, 5) if width < 100 else (3,)
    for prim, operands, shape, params in _cases(rows, width, dtype):
        found = _run(emulated, prim, operands, shape, params)
        _compare(prim, found, _expected(prim, operands, shape, params), operands)


@pytest.mark.parametrize("dtype, width", [(np.float32, 32), (np.float64, 3), (ml_dtypes.bfloat16, 1024)])
def test_more_cotangents_than_values(emulated, dtype, width):
    for prim, operands, shape, params in _cases((3,), width, dtype, leads=(2, 2)):
        found = _run(emulated, prim, operands, shape, params)
        _compare(prim, found, _expected(prim, operands, shape, params), operands)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("width", [32, 1024, 9000])
def test_alignment_and_strides_change_no_bit(emulated, dtype, width):
    for prim, operands, shape, params in _cases((3,), width, dtype):
        found = _run(emulated, prim, operands, shape, params)
        for change in (_misaligned, np.asfortranarray, lambda x: np.repeat(x, 2, axis=-1)[..., ::2]):
            again = _run(emulated, prim, [change(x) for x in operands], shape, params)
            np.testing.assert_array_equal(again.view(np.uint8), found.view(np.uint8), err_msg=prim.name)


def test_result_between_two_packs(emulated):
    for prim, operands, shape, params in _cases((3,), 32, np.float32):
        found = _run(emulated, prim, operands, shape, params)
        out = _misaligned(np.zeros(shape, np.float32))
        prim.cuda(emulated, *operands, out=out, **params)
        np.testing.assert_array_equal(out, found, err_msg=prim.name)


@pytest.mark.parametrize("rows, width", [((0,), 3), ((3,), 0), ((2, 0), 5), ((), 4)])
def test_no_rows_and_no_width(emulated, rows, width):
    for prim, operands, shape, params in _cases(rows, width, np.float32):
        found = _run(emulated, prim, operands, shape, params)
        _compare(prim, found, _expected(prim, operands, shape, params), operands)


@pytest.mark.parametrize("width", [5, 32, 1100, 9000])
def test_infinities_and_nan(emulated, width):
    x = _draw(1, (6, width), np.float32)
    x[0], x[1, 1], x[2, 2], x[3, :3] = -np.inf, np.inf, np.nan, -np.inf
    x[4] *= 1e4
    labels = np.full(6, 4)
    for prim, operands in ((softmax_p, (x,)), (log_softmax_p, (x,)), (cross_entropy_p, (x, labels))):
        shape = labels.shape if prim is cross_entropy_p else x.shape
        found, expected = (f(prim, operands, shape, {}) for f in (partial(_run, emulated), _expected))
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6, err_msg=prim.name)
        assert np.isnan(found[:3]).all() or prim is log_softmax_p


@pytest.mark.parametrize("labels_dtype", [np.int32, np.uint8])
def test_label_dtypes(emulated, labels_dtype):
    x, labels = _draw(1, (4, 7), np.float32), np.array([0, 6, 3, 3], labels_dtype)
    found = _run(emulated, cross_entropy_p, (x, labels), (4,), {})
    np.testing.assert_allclose(found, _expected(cross_entropy_p, (x, labels), (4,), {}), rtol=1e-6)


def test_label_out_of_range(emulated):
    x = _draw(1, (20, 7), np.float32)
    for wrong in (7, -1, 2**40):
        labels = np.zeros(20, np.int64)
        labels[13], labels[17] = wrong, 100
        with pytest.raises(IndexingError, match="the label of row 13 is out of range for 7 classes"):
            _run(emulated, cross_entropy_p, (x, labels), (20,), {})


def test_many_rows_of_gamma(emulated):
    x, g = _draw(1, (700, 9), np.float32), _draw(2, (700, 9), np.float32)
    found = _run(emulated, layer_norm_vjp_gamma_p, (x, g), (9,), {"eps": EPS})
    _compare(layer_norm_vjp_gamma_p, found, _expected(layer_norm_vjp_gamma_p, (x, g), (9,), {"eps": EPS}), (x,))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(("rows", "width"), [(700, 9), (1300, 8), (650, 600), (45, 5000)])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffle:3"])
def test_columns_of_many_rows_are_summed_in_one_order(rows, width, order, emulated):
    """By several blocks, also by several groups of them, whatever was in their memory."""
    x, gamma, g = (_draw(i, shape, np.float32) for i, shape in enumerate(((rows, width), (width,), (rows, width))))
    (parts, arrived) = layer_norm_vjp_p.temporaries(None, x, gamma, g, eps=EPS)
    assert parts[0][1] > 1 and (arrived[0][1] > 2) == (rows > 512)
    found = []
    for rubbish in (0xA5, 0x00):
        given = [
            np.full(np.prod(shape) * dtype.itemsize, rubbish, np.uint8).view(dtype) for shape, dtype in (parts, arrived)
        ]
        out = np.empty(rows * width + 2 * width, np.float32)
        device = Ordered(emulated, order)
        layer_norm_vjp_p.cuda(device, x, gamma, g, out=out, eps=EPS, temporaries=given)
        assert not given[1][arrived[0][1] == 2 :].any()  # of one group there is nothing to count
        found.append(out)
    np.testing.assert_array_equal(*found)
    np.testing.assert_array_equal(found[0], _run(emulated, layer_norm_vjp_p, (x, gamma, g), out.shape, {"eps": EPS}))
    _compare(layer_norm_vjp_p, out, _expected(layer_norm_vjp_p, (x, gamma, g), out.shape, {"eps": EPS}), (x,))


class Ordered:
    """A device whose blocks run in another order."""

    def __init__(self, device, order):
        self.xp, self.compile, self.empty, self.order = device.xp, device.compile, device.empty, order

    def launch(self, function, grid, block, args, shared=0):
        function(grid, block, args, order=self.order)


def test_the_cotangent_of_rows_alone_has_the_same_bits(emulated):
    for dtype, width in ((np.float32, 40), (np.float32, 5000), (ml_dtypes.bfloat16, 1024)):
        x, gamma, g = _draw(1, (9, width), dtype), _draw(2, (width,), dtype), _draw(3, (9, width), dtype)
        alone = _run(emulated, layer_norm_vjp_x_p, (x, gamma, g), x.shape, {"eps": EPS})
        both = _run(emulated, layer_norm_vjp_p, (x, gamma, g), (x.size + 2 * width,), {"eps": EPS})
        np.testing.assert_array_equal(both[: x.size].view(np.uint8), alone.reshape(-1).view(np.uint8))


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("width", [5, 40, 600])
def test_watched(watched, width):
    for prim, operands, shape, params in _cases((3,), width, np.float32):
        found = _run(watched, prim, operands, shape, params)
        _compare(prim, found, _expected(prim, operands, shape, params), operands)


_REDUCE = """
#include "reduce.cuh"
extern "C" __global__ void reduce(const ELEMENT* x, ELEMENT* warps, ELEMENT* blocks) {
    __shared__ ELEMENT shared[THREADS_OF_TEST / 32];
    warps[threadIdx.x] = tg_warp_reduce<OP<ELEMENT>>(x[threadIdx.x]);
    blocks[threadIdx.x] = tg_block_reduce<OP<ELEMENT>, THREADS_OF_TEST>(x[threadIdx.x], shared);
}
"""
UFUNCS = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}


def _reduce(device, x, op, order="forward"):
    macros = (f"-DELEMENT={cuda_types.compute(x.dtype)}", f"-DOP=tg_{op}", f"-DTHREADS_OF_TEST={x.size}")
    function = device.compile(_REDUCE, "reduce", (*options(), *macros))
    warps, blocks = device.empty(x.shape, x.dtype), device.empty(x.shape, x.dtype)
    function((1,), (x.size,), (x, warps, blocks), order=order)
    return warps, blocks


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("op", UFUNCS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint64", "int8", "complex64", "complex128"])
def test_reductions(emulated, dtype, op):
    for threads in (32, 96):
        x = _draw(8, (threads,), dtype, 3)
        x += 1 if x.dtype.kind == "c" else 0
        warps, blocks = _reduce(emulated, x, op)
        ufunc = UFUNCS[op]
        for found, parts in ((warps, x.reshape(-1, 32)), (blocks, x.reshape(1, -1))):
            expected = np.repeat(ufunc.reduce(parts, axis=1, dtype=x.dtype), parts.shape[1])
            np.testing.assert_allclose(found, expected, rtol=2e-4 if dtype == "complex64" else 2e-5)
            assert len(set(found.reshape(len(parts), -1)[0].tolist())) == 1  # every thread has the same bits


@pytest.mark.parametrize("op", ["logical_and", "logical_or"])
def test_reductions_of_bools(emulated, op):
    for x in (np.ones(64, bool), np.zeros(64, bool), np.arange(64) == 40):
        warps, blocks = _reduce(emulated, x, op)
        ufunc = getattr(np, op)
        np.testing.assert_array_equal(warps, np.repeat(ufunc.reduce(x.reshape(2, 32), axis=1), 32))
        np.testing.assert_array_equal(blocks, np.full(64, ufunc.reduce(x)))


def test_reductions_pass_nan_on_and_have_one_order(emulated):
    x = _draw(9, (256,), np.float32)
    bits = [_reduce(emulated, x, "add", order)[1].view(np.uint32) for order in ("forward", "reverse", "shuffle:3")]
    assert (bits[0] == bits[1]).all() and (bits[0] == bits[2]).all()
    x[77] = np.nan
    assert all(np.isnan(_reduce(emulated, x, op)[1]).all() for op in ("maximum", "minimum"))
