"""Matrix products; on the CPU cut into pieces by shape alone, each made by NumPy's BLAS library on one thread.

The pieces are spread over tapegrad's own threads, so that no bit depends on their number.  The library's own threads
are not used where it can be told so: OpenBLAS lets only one product at a time use them, and they spin while they wait,
so that one busy core more makes a product take ten times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from tapegrad.core import locks
from tapegrad.device import gemm, threads
from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array, DType, Namespace

_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
_PRODUCTS = (
    ("scipy_cblas_{}gemm64_", ctypes.c_int64),
    ("scipy_cblas_{}gemm", ctypes.c_int),
    ("cblas_{}gemm64_", ctypes.c_int64),
    ("cblas_{}gemm", ctypes.c_int),
)
_BY_ROWS, _AS_IT_IS, _TURNED = 101, 111, 112  # CBLAS's words


def _find() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions that get and set the number, of the OpenBLAS that NumPy is linked with (None: another library)."""
    try:
        return thread_functions(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
    except AttributeError:
        return None


def thread_functions(path: str) -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """As :func:`_find`, of the library of this path: they take a third of the time of threadpoolctl's, which search."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for name in _NAMES:
        try:
            return getattr(library, name.format("get_num_threads")), getattr(library, name.format("set_num_threads"))
        except AttributeError:
            continue
    return None


def _find_adding() -> dict[DType, Callable[..., None]]:
    """The library's products that add to what is there, by dtype (empty: another library)."""
    if controls is None:
        return {}
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
    found = {}
    for letter, real, dtype in (("s", ctypes.c_float, "f4"), ("d", ctypes.c_double, "f8")):
        for name, size in _PRODUCTS:
            product = getattr(library, name.format(letter), None)
            if product is not None:
                pointer, word = ctypes.c_void_p, ctypes.c_int
                product.argtypes = [*[word] * 3, *[size] * 3, real, *[pointer, size] * 2, real, pointer, size]
                product.restype = None
                found[np.dtype(dtype)] = product
                break
    return found


controls = _find()
_adding = _find_adding()
_lock = locks.lock()
_users = 0
_before = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Each product made inside the block, in any thread, runs on one thread; afterwards as before."""
    global _users, _before
    if controls is None:
        yield
        return
    get, set_to = controls
    with _lock:
        _users += 1
        if _users == 1:
            _before = get()
            set_to(1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                set_to(_before)


# In multiply-adds.  Measured with OpenBLAS, which does some 48 G of float32 a second on one core here: a piece takes
# 0.7 ms, waking a thread some 0.1; a batch pays from 16 Mi on, cut into tasks of 2 Mi or more.
_CUT, _PIECE, _PIECES = 2**24, 2**25, 16
_LEAST_BATCH, _TASK = 2**24, 2**21
_LIBRARY = 2**19  # below, OpenBLAS stays on one thread by itself


def matmul(xp: Namespace, x: Array, y: Array, out: Array, tf32: bool = False) -> None:
    """``x @ y`` into ``out``: stacks of matrices, of which leading dimensions broadcast.

    Half types are multiplied in float32 and rounded once: by cuBLAS itself, and here, where NumPy would multiply them
    element by element, through copies.  ``tf32``: float32 operands are rounded to 10 bits of fraction, as tensor cores
    take them.
    """
    if xp is not np:
        gemm.matmul(xp, x, y, out, tf32=tf32)
        return
    if tf32 and out.dtype == np.float32:
        x, y = in_tf32(x), in_tf32(y)
    wide = accumulator(out.dtype)
    if wide != out.dtype:
        product = np.empty(out.shape, wide)
        matmul(xp, x.astype(wide), y.astype(wide), product)
        with np.errstate(over="ignore"):  # silent, as on a GPU: a loss scaler looks for what has become infinite
            np.copyto(out, product, casting="same_kind")
        return
    if x.shape[-1] == 1:  # an outer product: half the time
        np.multiply(x, y, out=out)
        return
    batch, each = out.shape[:-2], out.shape[-2] * out.shape[-1] * x.shape[-1]
    many = prod(batch)
    if controls is None:
        np.matmul(x, y, out=out)
    elif many == 1:
        _one(x.reshape(x.shape[-2:]), y.reshape(y.shape[-2:]), out.reshape(out.shape[-2:]), each)
    elif each * many < _LEAST_BATCH or each > _CUT:
        x = np.broadcast_to(x, (*batch, *x.shape[-2:]))
        y = np.broadcast_to(y, (*batch, *y.shape[-2:]))
        if each > _CUT:
            for index in np.ndindex(*batch):
                _one(x[index], y[index], out[index], each)
        else:
            np.matmul(x, y, out=out)
    else:
        _batch(x, y, out, each * many)


def bound(x: Array, y: Array, out: Array, tf32: bool = False) -> tuple[Callable[..., object], tuple[Any, ...]] | None:
    """The call that :func:`matmul` comes to for these arrays of NumPy's, inside :func:`one_thread`.

    None: it takes more than that, or NumPy's library is another.
    """
    wide = accumulator(out.dtype) != out.dtype or (tf32 and out.dtype == np.float32)
    if wide:
        return None
    if x.shape[-1] == 1:
        return np.multiply, (x, y, out)
    if controls is None or prod(out.shape[:-2]) != 1:
        return None
    x, y, out = x.reshape(x.shape[-2:]), y.reshape(y.shape[-2:]), out.reshape(out.shape[-2:])
    pieces = _pieces(x, y, out)
    return (np.matmul, pieces[0]) if len(pieces) == 1 else (_several, (pieces,))


def assumes_one_thread(f: object) -> bool:
    """Whether ``f`` is of what :func:`bound` gives."""
    return f is np.matmul or f is _several


def adds(dtype: DType) -> bool:
    """Whether :func:`add_product` serves for a dtype: whether NumPy's library is one whose functions are known."""
    return dtype in _adding


def add_product(
    dtype: DType, m: int, n: int, k: int, x: tuple[int, int], y: tuple[int, int], out: tuple[int, int],
    more: bool = False, x_turned: bool = False, y_turned: bool = False,
) -> None:  # fmt: skip
    """``out (m, n) = x (m, k) @ y (k, n)``, or with ``more`` that besides what is there; :func:`adds` must be true.

    A matrix is given by the address of its first element, and how many elements it is from row to row.  Turned,
    x is given as ``(k, m)``, y as ``(n, k)``.
    """
    turns = _TURNED if x_turned else _AS_IT_IS, _TURNED if y_turned else _AS_IT_IS
    _adding[dtype](_BY_ROWS, *turns, m, n, k, 1.0, *x, *y, float(more), *out)


def in_tf32(x: Array) -> Array:
    """A float32 array rounded to 10 bits of fraction, ties away from zero, as the kernels round (``cvt.rna.tf32``).

    What is not finite stays as it is.
    """
    bits = np.array(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    special = (bits & 0x7F800000) == 0x7F800000
    return np.where(special, bits, rounded).view(np.float32)


def _one(x: Array, y: Array, out: Array, work: int) -> None:
    """One product: its longer side is cut."""
    if work < _LIBRARY:
        np.matmul(x, y, out=out)
        return
    with one_thread():
        _several(_pieces(x, y, out))


def _pieces(x: Array, y: Array, out: Array) -> list[tuple[Array, Array, Array]]:
    """The products that one consists of, by its shape alone."""
    work = out.size * x.shape[-1]
    pieces = min(_PIECES, max(2, work // _PIECE)) if work >= _CUT else 1
    step = -(-max(out.shape) // pieces)
    if pieces < 2 or step < 16:
        return [(x, y, out)]
    parts = [slice(start, start + step) for start in range(0, max(out.shape), step)]
    if out.shape[0] >= out.shape[1]:
        return [(x[part], y, out[part]) for part in parts]
    return [(x, y[:, part], out[:, part]) for part in parts]


def _several(pieces: list[tuple[Array, Array, Array]]) -> None:
    """Make these products, each on one thread."""
    if len(pieces) == 1:
        np.matmul(*pieces[0])
        return

    def run(number: int) -> None:
        np.matmul(*pieces[number])

    threads.run([run] * min(threads.get_num_threads(), len(pieces)), len(pieces))


def _batch(x: Array, y: Array, out: Array, work: int) -> None:
    """Many small products: the longest batch dimension is cut."""
    batch = out.shape[:-2]
    x = np.broadcast_to(x, (*batch, *x.shape[-2:]))
    y = np.broadcast_to(y, (*batch, *y.shape[-2:]))
    count = max(batch)
    before = (slice(None),) * batch.index(count)
    step = max(1, _TASK * count // work)

    def run(number: int) -> None:
        part = (*before, slice(number * step, (number + 1) * step))
        np.matmul(x[part], y[part], out=out[part])

    _spread(run, -(-count // step))


def _spread(run: Callable[[int], None], tasks: int) -> None:
    with one_thread():
        threads.run([run] * min(threads.get_num_threads(), tasks), tasks)
