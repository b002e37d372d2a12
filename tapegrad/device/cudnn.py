"""cuDNN, through NVIDIA's frontend: convolutions of float32, float16 and bfloat16 on a GPU, where both are installed.

The extras ``cudnn12`` and ``cudnn13`` bring them (``cudnn`` the frontend alone, for a cuDNN that is there already);
``TAPEGRAD_CUDNN=0`` does without, and with ``TAPEGRAD_CUDNN=1`` it is an error if they cannot be used.

For each kind of convolution, shapes, dtype and precision there is one *plan*, an engine of cuDNN's with its settings.
cuDNN's heuristics name it, which look at these and at the kind of device: nothing is timed.  Engines are refused whose
bits differ from run to run, that round operands or sums to less than they have, that take other sums of products
(Winograd's, Fourier transforms), and, for float32 proper, that multiply on tensor cores.  So a convolution has the same
bits eager, run again, within a budget and captured.

A plan says beforehand how much memory it needs, and gets it from whoever runs it: nothing is allocated while it runs,
so it can run while a stream is capturing.  Plans are made before, when the work is; where one is missing during a
capture, a GraphError leaves the work outside the graph.  A plan is kept as long as the process, since graphs refer to
its code.

Names are those of the package ``cudnn`` (``cudnn.pygraph``), 1.14 or later.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tapegrad.core import locks
from tapegrad.device.dtypes import bfloat16, float16, float32
from tapegrad.device.numerics.windows import Moves
from tapegrad.device.types import DType
from tapegrad.errors import GraphError, KernelError, TapegradError

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

Sizes: TypeAlias = tuple[int, ...]

PACKAGE = "nvidia-cudnn-frontend"
HOW = "pip install 'tapegrad[cudnn12]' (CUDA 13: 'tapegrad[cudnn13]') brings it"

FORWARD, IN_IMAGE, IN_KERNEL = "conv_fprop", "conv_dgrad", "conv_wgrad"
"""The kinds of convolution, by the names of the frontend's functions."""
_OPERANDS = {FORWARD: ("image", "weight"), IN_IMAGE: ("loss", "filter"), IN_KERNEL: ("image", "loss")}
_TYPES = {float32: "FLOAT", float16: "HALF", bfloat16: "BFLOAT16"}
REFUSED = (
    "NONDETERMINISTIC", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD", "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13",
)  # fmt: skip
"""What an engine must not say of itself (``cudnn.numerical_note``)."""
_LEAST = 90000  # the version of cuDNN
SPARE = 32 * 2**20
"""Bytes of workspace that a plan may ask for, beside two copies of operands and result."""
ALIGNMENT = 16
"""Bytes of which the addresses of operands and results are multiples."""


class Plan(NamedTuple):
    """How cuDNN computes one convolution, which takes ``workspace`` bytes for itself."""

    graph: Any
    workspace: int


class CuDNN:
    """The library on one device: its handle, and the plans made so far.  Several threads may use it."""

    def __init__(self, library: Any, xp: Any, index: int) -> None:
        """Raises RuntimeError where there is no room for a handle, or no device that cuDNN can use."""
        self.library, self._xp, self._index = library, xp, index
        self.version = version(library)
        self.declined: dict[tuple[Any, ...], str] = {}
        """Why there is no plan, by what was asked for."""
        self._plans: dict[tuple[Any, ...], Plan | None] = {}
        self._lock, self._stream = locks.lock(), 0
        memory = xp.cuda.runtime.memGetInfo
        with xp.cuda.Device(index):
            before = memory()[0]
            self._handle = library.create_handle()
            self.outside_bytes = max(0, before - memory()[0])
            """What the handle has taken from the driver: it is in no pool and no budget."""
        self.target: dict[str, Any] = {"handle": self._handle}
        """For what graphs are made."""

    def plan(self, kind: str, first: Sizes, second: Sizes, result: Sizes, dtype: DType, moves: Moves) -> Plan | None:
        """How to compute a convolution, or None where cuDNN has nothing for it.

        kind: FORWARD of an image (n, channels, sizes ...) and a kernel (outputs, channels / groups, taps ...), IN_IMAGE
        of a result's cotangent and a kernel, IN_KERNEL of an image and a cotangent.  Raises GraphError if it is asked
        for the first time while the current stream is capturing.
        """
        key = kind, first, second, result, dtype, moves
        try:
            return self._plans[key]
        except KeyError:
            pass
        with self._lock:
            if key not in self._plans:
                self._plans[key] = self._made(key)
            return self._plans[key]

    def _made(self, key: tuple[Any, ...]) -> Plan | None:
        kind, first, second, result, dtype, moves = key
        if dtype not in _TYPES or not _is_plain(moves, result if kind == IN_KERNEL else second):
            return None
        require_not_capturing(self._xp, f"a plan for {kind} of {first} and {second}")
        try:
            with self._xp.cuda.Device(self._index):
                graph = self.graph(*key)
                return Plan(graph, int(graph.get_workspace_size()))
        except (self.library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as e:
            self.declined[key] = f"{type(e).__name__}: {e}"
            return None

    def graph(self, kind: str, first: Sizes, second: Sizes, result: Sizes, dtype: DType, moves: Moves) -> Any:
        """The frontend's graph of one convolution, with the plan built.  Raises what the frontend raises."""
        cudnn = self.library
        plain, wide = getattr(cudnn.data_type, _TYPES[dtype]), cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            name=kind, io_data_type=plain, intermediate_data_type=wide, compute_data_type=wide, **self.target
        )
        shapes = [_in_plane(shape) for shape in (first, second, result)]
        operands = [
            graph.tensor(dim=list(shape), stride=_strides(shape), data_type=plain, name=name)
            for shape, name in zip(shapes, _OPERANDS[kind])
        ]
        before, after = ([pair[i] for pair in moves.padding] for i in (0, 1))
        out = getattr(graph, kind)(
            **dict(zip(_OPERANDS[kind], operands, strict=True)),
            pre_padding=_along(before, 0), post_padding=_along(after, 0), stride=_along(moves.strides, 1),
            dilation=_along(moves.dilation, 1), compute_data_type=wide, name=kind,
        )  # fmt: skip
        out.set_output(True)
        out.set_data_type(plain)
        out.set_dim(list(shapes[2]))
        out.set_stride(_strides(shapes[2]))
        for uid, tensor in enumerate((*operands, out), 1):
            tensor.set_uid(uid)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        refused = REFUSED if dtype != float32 or moves.tf32 else (*REFUSED, "TENSOR_CORE")
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, name) for name in refused])
        graph.deselect_workspace_greater_than(SPARE + 2 * dtype.itemsize * sum(map(prod, shapes)))
        graph.check_support()
        graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return graph

    def run(self, plan: Plan, stream: int, *addresses: int, workspace: int = 0) -> None:
        """Compute on a stream: from the operands at the first two addresses to the result at the third.

        Arrays are C-contiguous.  ``workspace``: where the plan's memory is.  Raises KernelError.
        """
        with self._lock:
            try:
                if stream != self._stream:
                    self.library.set_stream(handle=self._handle, stream=stream)
                    self._stream = stream
                plan.graph.execute(dict(enumerate(addresses, 1)), workspace, handle=self._handle)
            except (self.library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as e:
                raise KernelError(f"cuDNN: a convolution failed: {e}; TAPEGRAD_CUDNN=0 does without cuDNN") from e

    def __del__(self, at_exit: Any = sys.is_finalizing) -> None:
        if not at_exit() and hasattr(self, "_handle"):
            with self._xp.cuda.Device(self._index):
                self.library.destroy_handle(self._handle)


def _is_plain(moves: Moves, kernel: Sizes) -> bool:
    """Whether no window lies in the padding alone."""
    reach = ((k - 1) * d for k, d in zip(kernel[2:], moves.dilation))
    return all(0 <= p <= far for pair, far in zip(moves.padding, reach) for p in pair)


def _in_plane(shape: Sizes) -> Sizes:
    """The shape with two spatial sizes at least: cuDNN's engines are of planes and solids."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def _along(values: Any, least: int) -> list[int]:
    """An entry for each spatial size of :func:`_in_plane`."""
    return [least, *values] if len(values) == 1 else list(values)


def _strides(shape: Sizes) -> list[int]:
    """Steps, in elements, of an array in C order."""
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def require_not_capturing(xp: Any, what: str) -> None:
    """Raise GraphError if the current stream is capturing."""
    try:
        captures = xp.cuda.get_current_stream().is_capturing()
    except RuntimeError:  # a capture that has failed already
        captures = True
    if captures:
        raise GraphError(f"cuDNN: {what} must be made before a stream captures")


def library() -> Any:
    """The frontend, with cuDNN behind it, if there is one.

    Warns where it is installed and cannot be used; raises TapegradError then if ``TAPEGRAD_CUDNN=1``.
    """
    chosen = os.environ.get("TAPEGRAD_CUDNN", "")
    if chosen == "0" or (chosen != "1" and importlib.util.find_spec("cudnn") is None):
        return None
    try:
        return _loaded()
    except (ImportError, OSError, AttributeError, RuntimeError, AssertionError, TapegradError) as e:
        if chosen == "1":
            raise TapegradError(f"TAPEGRAD_CUDNN=1: cuDNN cannot be used: {e}; {HOW}") from e
        warnings.warn(
            f"{PACKAGE} is installed, but cannot be used: {e}; convolutions go on without it. "
            f"{HOW} with its library, or set TAPEGRAD_CUDNN=0",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _loaded() -> Any:
    """Raises ImportError, OSError, AttributeError, RuntimeError (no libcudnn), TapegradError (an old one)."""
    cudnn = importlib.import_module("cudnn")
    number = int(cudnn.backend_version())
    if number < _LEAST:
        raise TapegradError(f"it found cuDNN {version(cudnn)}; wanted is cuDNN {_LEAST // 10000} or later")
    for name in ("pygraph", "create_handle", "destroy_handle", "set_stream", "cudnnGraphNotSupportedError"):
        getattr(cudnn, name)
    return cudnn


def version(cudnn: Any) -> str:
    """The version of cuDNN as text: 92800 is 9.28.0 (and 8907 was 8.9.7)."""
    number = int(cudnn.backend_version())
    step = 10000 if number >= _LEAST else 1000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def made(xp: Any, index: int) -> CuDNN | None:
    """cuDNN on a device, or None where there is none."""
    cudnn = library()
    if cudnn is None:
        return None
    require_not_capturing(xp, "a handle")
    try:
        return CuDNN(cudnn, xp, index)
    except RuntimeError as e:
        if os.environ.get("TAPEGRAD_CUDNN") == "1":
            raise TapegradError(f"TAPEGRAD_CUDNN=1: cuDNN cannot use cuda:{index}: {e}") from e
        failures[index] = str(e)
        return None


failures: dict[int, str] = {}
"""Why cuDNN cannot use a device, by its number."""


def said(device: CudaDevice) -> str:
    """For reports: whether cuDNN computes convolutions on a device, and if not, why."""
    if (found := device.cudnn) is not None:
        return f"{found.version} for convolutions"
    if os.environ.get("TAPEGRAD_CUDNN") == "0":
        return "none; TAPEGRAD_CUDNN=0"
    return f"none; {failures.get(device.index, HOW)}"


@contextmanager
def without(device: CudaDevice) -> Iterator[None]:
    """Convolutions on a device go without cuDNN inside the block, those of all threads: to compare the two."""
    before = device.cudnn
    device._cudnn = (None,)
    try:
        yield
    finally:
        device._cudnn = (before,)
