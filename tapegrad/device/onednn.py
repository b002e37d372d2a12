"""oneDNN, called through ctypes: works of float32 on a CPU, by machine code made for each shape.

The library is that of the extra ``onednn``, where it is installed; ``TAPEGRAD_ONEDNN`` names another file of oneDNN 3,
or says ``0``: none.  Every call works on the thread that makes it, with scratch memory of ours: whoever calls has cut
the work into parts that depend on shapes alone, so no bit depends on the number of threads, and no thread of OpenMP is
there that a fork would lose.

Names and numbers are those of ``oneapi/dnnl/dnnl.h`` and ``dnnl_types.h``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, TypeAlias

from tapegrad.errors import TapegradError

Sizes: TypeAlias = tuple[int, ...]

PACKAGE = "onednn-cpu-gomp"
"""The distribution that brings the library."""
HOW = "pip install 'tapegrad[onednn]' brings it to Linux on x86-64"

SRC, DST, WEIGHTS, MEAN, VARIANCE, SCALE, SHIFT, SCRATCHPAD = 1, 17, 33, 49, 50, 51, 52, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS, DIFF_SCALE, DIFF_SHIFT = 129, 145, 161, 255, 256
"""Arguments of primitives."""
_QUERIES = {SRC: 129, WEIGHTS: 131, DIFF_WEIGHTS: 132, DST: 133, DIFF_DST: 134, SCRATCHPAD: 136}
_IMPLEMENTATION = 8
_F32, _ANY, _DIRECT, _TRAINING, _BACKWARD, _CPU, _IN_ORDER, _USER = 3, 1, 1, 64, 128, 1, 1, 1
_SCALE_AND_SHIFT = 6
_UNIMPLEMENTED = 3
_RUNTIMES = {1: "no threads", 2: "OpenMP"}
"""How the library may make threads: one of TBB's or SYCL's cannot be told to take none."""
SLOW = (b"ref", b"gemm", b"x64:gemm")
"""Implementations that are loops without SIMD, or make columns in memory."""
_AXES = 12  # of ``dnnl_dims_t``

_int, _unsigned, _float, _pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_float, ctypes.c_void_p
_out = ctypes.POINTER(_pointer)
_dims = ctypes.c_int64 * _AXES
_PARAMETERS = {
    "dnnl_engine_create": (_out, _int, ctypes.c_size_t),
    "dnnl_stream_create": (_out, _pointer, _unsigned),
    "dnnl_primitive_attr_create": (_out,),
    "dnnl_primitive_attr_set_scratchpad_mode": (_pointer, _int),
    "dnnl_memory_desc_create_with_strides": (_out, _int, _dims, _int, _dims),
    "dnnl_memory_desc_create_with_tag": (_out, _int, _dims, _int, _int),
    "dnnl_memory_desc_clone": (_out, _pointer),
    "dnnl_memory_desc_destroy": (_pointer,),
    "dnnl_memory_create": (_out, _pointer, _pointer, _pointer),
    "dnnl_memory_set_data_handle": (_pointer, _pointer),
    "dnnl_memory_destroy": (_pointer,),
    "dnnl_primitive_desc_query": (_pointer, _int, _int, _pointer),
    "dnnl_primitive_desc_destroy": (_pointer,),
    "dnnl_primitive_create": (_out, _pointer),
    "dnnl_primitive_execute": (_pointer, _pointer, _int, _pointer),
    "dnnl_primitive_destroy": (_pointer,),
    "dnnl_reorder_primitive_desc_create": (_out, *[_pointer] * 5),
    "dnnl_convolution_forward_primitive_desc_create": (
        _out, _pointer, _int, _int, *[_pointer] * 4, *[_dims] * 4, _pointer,
    ),
    "dnnl_convolution_backward_weights_primitive_desc_create": (
        _out, _pointer, _int, *[_pointer] * 4, *[_dims] * 4, _pointer, _pointer,
    ),
    "dnnl_layer_normalization_forward_primitive_desc_create": (
        _out, _pointer, _int, *[_pointer] * 3, _float, _unsigned, _pointer,
    ),
    "dnnl_layer_normalization_backward_primitive_desc_create": (
        _out, _pointer, _int, *[_pointer] * 4, _float, _unsigned, _pointer, _pointer,
    ),
}  # fmt: skip
"""The functions that return a status, with their parameters."""


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", _int), ("minor", _int), ("patch", _int), ("hash", ctypes.c_char_p),
        ("cpu_runtime", _unsigned), ("gpu_runtime", _unsigned),
    )  # fmt: skip


class _Argument(ctypes.Structure):
    _fields_ = (("number", _int), ("memory", _pointer))


class UnsupportedError(Exception):
    """The library has nothing fast for these shapes."""


class _Owned:
    """An object of the library's, which is destroyed with this one."""

    __slots__ = ("_destroy", "pointer")

    def __init__(self, create: Callable[..., int], destroy: Callable[[Any], int], *given: Any) -> None:
        pointer = _pointer()
        status = create(ctypes.byref(pointer), *given)
        if status == _UNIMPLEMENTED:
            raise UnsupportedError
        if status:
            raise TapegradError(f"oneDNN: {create.__name__} returned status {status}")
        self.pointer, self._destroy = pointer, destroy

    def __del__(self, at_exit: Any = sys.is_finalizing) -> None:
        if not at_exit() and hasattr(self, "pointer"):
            self._destroy(self.pointer)


class Layout(_Owned):
    """Where the elements of an array are, in ``nbytes``."""

    __slots__ = ("_library", "nbytes")

    def __init__(self, library: Any, create: Callable[..., int], *given: Any) -> None:
        super().__init__(create, library.dnnl_memory_desc_destroy, *given)
        self._library, self.nbytes = library, int(library.dnnl_memory_desc_get_size(self.pointer))

    def is_same(self, other: Layout) -> bool:
        """Whether it tells the same place of every element."""
        return bool(self._library.dnnl_memory_desc_equal(self.pointer, other.pointer))


class Primitive:
    """A computation on arrays that lie as ``layouts`` tell, by argument; it takes ``scratch`` bytes for itself."""

    def __init__(self, onednn: OneDNN, desc: _Owned, layouts: dict[int, Layout]) -> None:
        library, pad = onednn.library, onednn.layout_of(desc, SCRATCHPAD)
        self._onednn = onednn
        self._code = _Owned(library.dnnl_primitive_create, library.dnnl_primitive_destroy, desc.pointer)
        self.layouts, self.scratch = layouts, pad.nbytes
        self._all = {**layouts, SCRATCHPAD: pad} if pad.nbytes else layouts
        self._idle: list[_Binding] = []

    def run(self, *addresses: int, scratch: int = 0) -> None:
        """Compute, with arguments at ``addresses`` in the order of ``layouts``; ``scratch``: memory for itself.

        Several threads may do so at the same time.
        """
        try:
            binding = self._idle.pop()
        except IndexError:
            binding = _Binding(self._onednn, self._code, self._all)
        binding.use((*addresses, scratch))
        binding.run()
        self._idle.append(binding)

    def bound(self, *addresses: int, scratch: int = 0) -> Callable[[], None]:
        """A function that computes with these arguments, as long as they are there; not for several threads at once."""
        binding = _Binding(self._onednn, self._code, self._all)
        binding.use((*addresses, scratch))
        return binding.run


class _Binding:
    """The arguments of a primitive, for one call at a time."""

    def __init__(self, onednn: OneDNN, code: _Owned, layouts: dict[int, Layout]) -> None:
        self._onednn, self._code = onednn, code
        self._memories = [onednn.memory(layout) for layout in layouts.values()]
        pairs = [_Argument(number, memory.pointer) for number, memory in zip(layouts, self._memories, strict=True)]
        self._arguments = (_Argument * len(pairs))(*pairs)

    def use(self, addresses: Sequence[int]) -> None:
        """Where the arguments are from now on."""
        for memory, address in zip(self._memories, addresses):
            self._onednn.library.dnnl_memory_set_data_handle(memory.pointer, address)

    def run(self) -> None:
        """Compute."""
        execute, count = self._onednn.library.dnnl_primitive_execute, len(self._arguments)
        if status := execute(self._code.pointer, self._onednn.stream, count, self._arguments):
            raise TapegradError(f"oneDNN: a primitive's execution returned status {status}")


class OneDNN:
    """The library: layouts and primitives."""

    def __init__(self, library: Any, version: str) -> None:
        self.library, self.version = library, version
        for name, parameters in _PARAMETERS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = parameters, _int
        library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        library.dnnl_memory_desc_get_size.argtypes = library.dnnl_primitive_destroy.argtypes
        library.dnnl_memory_desc_equal.argtypes = (_pointer, _pointer)
        library.dnnl_primitive_desc_query_md.restype = _pointer
        library.dnnl_primitive_desc_query_md.argtypes = (_pointer, _int, _int)
        keep = lambda _: 0  # as long as the process
        self._engine = _Owned(library.dnnl_engine_create, keep, _CPU, 0).pointer
        self.stream = _Owned(library.dnnl_stream_create, keep, self._engine, _IN_ORDER).pointer
        self._attributes = _Owned(library.dnnl_primitive_attr_create, keep).pointer
        library.dnnl_primitive_attr_set_scratchpad_mode(self._attributes, _USER)
        self.layout = lru_cache(maxsize=4096)(self._layout)
        """``layout(shape, strides=None)``: float32 elements, steps in elements; without: as the library likes them."""
        self.reorder = lru_cache(maxsize=1024)(self._reorder)
        """``reorder(source, target)``: the primitive that copies from SRC to DST, each in its layout."""

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """What this thread calls inside the block starts no others."""
        tell = getattr(self.library, "omp_set_num_threads", None)  # in the OpenMP library that this one has loaded
        if tell is None:
            yield
            return
        before = self.library.omp_get_max_threads()
        tell(1)
        try:
            yield
        finally:
            tell(before)

    def _layout(self, shape: Sizes, strides: Sizes | None = None) -> Layout:
        library, sizes = self.library, _dims(*shape)
        if strides is None:
            return Layout(library, library.dnnl_memory_desc_create_with_tag, len(shape), sizes, _F32, _ANY)
        return Layout(
            library, library.dnnl_memory_desc_create_with_strides, len(shape), sizes, _F32, _dims(*strides)
        )  # fmt: skip

    def memory(self, layout: Layout) -> _Owned:
        """What hands an array of that layout to a primitive."""
        library = self.library
        return _Owned(library.dnnl_memory_create, library.dnnl_memory_destroy, layout.pointer, self._engine, None)

    def layout_of(self, desc: _Owned, argument: int) -> Layout:
        """Where a primitive wants the elements of an argument to be."""
        library = self.library
        pointer = library.dnnl_primitive_desc_query_md(desc.pointer, _QUERIES[argument], 0)
        return Layout(library, library.dnnl_memory_desc_clone, pointer)

    def _described(self, create: str, *given: Any) -> _Owned:
        library = self.library
        return _Owned(getattr(library, create), library.dnnl_primitive_desc_destroy, *given)

    def _reorder(self, source: Layout, target: Layout) -> Primitive:
        ends = (source.pointer, self._engine, target.pointer, self._engine)
        desc = self._described("dnnl_reorder_primitive_desc_create", *ends, self._attributes)
        return Primitive(self, desc, {SRC: source, DST: target})

    def convolution(self, x: Sizes, w: Sizes, y: Sizes, *moves: Sizes) -> Primitive:
        """The sum over taps and channels, from SRC and WEIGHTS to DST.

        x: (n, channels, sizes ...); w: (outputs, channels, taps ...), with an axis of groups in front of these where
        there are groups; y: (n, outputs, positions ...).  ``moves``: strides, gaps between taps, and padding before and
        after.  Raises UnsupportedError where the library has no fast code for it.
        """
        return self._made((SRC, WEIGHTS, DST), self._forward(x, w, y, moves))

    def in_weights(self, x: Sizes, w: Sizes, y: Sizes, *moves: Sizes) -> Primitive:
        """The gradient of :meth:`convolution` in its kernel, from SRC and DIFF_DST to DIFF_WEIGHTS."""
        hint = self._forward(x, w, y, moves)
        likes = [self.layout(shape).pointer for shape in (x, w)]
        desc = self._described(
            "dnnl_convolution_backward_weights_primitive_desc_create", self._engine, _DIRECT, *likes, None,
            self.layout(y).pointer, *(_dims(*each) for each in moves), hint.pointer, self._attributes,
        )  # fmt: skip
        return self._made((SRC, DIFF_DST, DIFF_WEIGHTS), desc)

    def _forward(self, x: Sizes, w: Sizes, y: Sizes, moves: Sequence[Sizes]) -> _Owned:
        likes = [self.layout(shape).pointer for shape in (x, w)]
        return self._described(
            "dnnl_convolution_forward_primitive_desc_create", self._engine, _TRAINING, _DIRECT, *likes, None,
            self.layout(y).pointer, *(_dims(*each) for each in moves), self._attributes,
        )  # fmt: skip

    def layer_norm(self, rows: int, width: int, eps: float) -> tuple[Primitive, Primitive]:
        """Normalization of rows over their elements, times a scale and plus a shift, and its derivative.

        From SRC, SCALE and SHIFT to DST, MEAN and VARIANCE; from SRC, DIFF_DST, MEAN, VARIANCE, SCALE and SHIFT to
        DIFF_SRC, DIFF_SCALE and DIFF_SHIFT, in that order.  Raises UnsupportedError.
        """
        x, column, row = self.layout((rows, width), (width, 1)), self.layout((rows,), (1,)), self.layout((width,), (1,))
        like = x.pointer, x.pointer, column.pointer, eps, _SCALE_AND_SHIFT
        there = self._described(
            "dnnl_layer_normalization_forward_primitive_desc_create", self._engine, _TRAINING, *like, self._attributes,
        )  # fmt: skip
        back = self._described(
            "dnnl_layer_normalization_backward_primitive_desc_create", self._engine, _BACKWARD, x.pointer, *like,
            there.pointer, self._attributes,
        )  # fmt: skip
        for desc in (there, back):
            self._refuse_slow(desc)
        stats, weights = {MEAN: column, VARIANCE: column}, {SCALE: row, SHIFT: row}
        results = {DIFF_SRC: x, DIFF_SCALE: row, DIFF_SHIFT: row}
        return (
            Primitive(self, there, {SRC: x, **weights, DST: x, **stats}),
            Primitive(self, back, {SRC: x, DIFF_DST: x, **stats, **weights, **results}),
        )

    def _made(self, arguments: Sequence[int], desc: _Owned) -> Primitive:
        """The primitive of a description, with the layouts that the library has chosen."""
        self._refuse_slow(desc)
        return Primitive(self, desc, {number: self.layout_of(desc, number) for number in arguments})

    def _refuse_slow(self, desc: _Owned) -> None:
        name = ctypes.c_char_p()
        self.library.dnnl_primitive_desc_query(desc.pointer, _IMPLEMENTATION, 0, ctypes.byref(name))
        if (name.value or b"ref").startswith(SLOW):
            raise UnsupportedError


@cache
def library() -> OneDNN | None:
    """The library, if there is one.  Raises TapegradError if ``TAPEGRAD_ONEDNN`` names none that can be used."""
    chosen = os.environ.get("TAPEGRAD_ONEDNN", "")
    if chosen == "0":
        return None
    path = chosen or _installed()
    if path is None:
        return None
    try:
        return _loaded(path)
    except (OSError, AttributeError, TapegradError) as e:
        if chosen:
            raise TapegradError(f"TAPEGRAD_ONEDNN={chosen}: {e}; name a libdnnl.so of oneDNN 3 with OpenMP") from e
        warnings.warn(
            f"{PACKAGE} is installed, but its library cannot be used: {e}; what it would do is done without it. "
            "Install libgomp (Debian: apt install libgomp1), or set TAPEGRAD_ONEDNN=0",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _installed() -> str | None:
    """The file of the extra's library."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == "libdnnl.so.3"), None)


def _loaded(path: str) -> OneDNN:
    """Raises OSError, AttributeError, TapegradError."""
    loaded = ctypes.CDLL(path)
    loaded.dnnl_version.restype = ctypes.POINTER(_Version)
    told = loaded.dnnl_version().contents
    version = f"{told.major}.{told.minor}.{told.patch}"
    if told.major != 3 or told.cpu_runtime not in _RUNTIMES:
        threads = _RUNTIMES.get(told.cpu_runtime, f"the thread runtime {told.cpu_runtime}")
        raise TapegradError(f"{path} is oneDNN {version} with {threads}; wanted is oneDNN 3 with OpenMP or no threads")
    return OneDNN(loaded, version)
