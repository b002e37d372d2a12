"""NVIDIA's frontend of cuDNN (the package ``cudnn``), as far as convolutions go: graphs, engines with notes, execution.

Arguments are checked as the frontend and cuDNN check them, more strictly where the real ones would crash or read what
nobody meant: steps are called in their order, shapes fit, every tensor is given, memory is there and aligned, the
handle is on the device.  ``offer()`` makes it what ``import cudnn`` gives.

Engines stand in the order in which heuristics name them.  Those that an exact, repeatable convolution must not use come
first, and show it: their results are wrong, or differ from call to call.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import sys
import types
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import capturing, memory, state

VERSION = 92800
#: What was asked for: graphs that were built, handles that there are, engines that ran, and what else to decline.
log = SimpleNamespace(built=[], handles=set(), ran=[], declines=lambda graph: False, fails=None)


class cudnnGraphNotSupportedError(Exception):
    """No engine serves the graph; it is no RuntimeError."""


class Name:
    """A member of an enumeration."""

    def __init__(self, kind: str, name: str):
        self.kind, self.name = kind, name

    def __repr__(self) -> str:
        return f"<{self.kind}.{self.name}>"


def _names(kind: str, *names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: Name(kind, name) for name in names})


data_type = _names("data_type", "NOT_SET", "FLOAT", "HALF", "BFLOAT16", "DOUBLE", "INT8", "INT32", "INT64")
heur_mode = _names("heur_mode", "A", "B", "FALLBACK")
build_plan_policy = _names("build_plan_policy", "HEURISTICS_CHOICE", "ALL")
numerical_note = _names(
    "numerical_note", "TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "NONDETERMINISTIC",
    "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13", "STRICT_NAN_PROP",
)  # fmt: skip


def _dtype(kind: Name) -> np.dtype:
    import ml_dtypes

    known = {"FLOAT": "float32", "HALF": "float16", "BFLOAT16": ml_dtypes.bfloat16}
    return np.dtype(known[kind.name])


def backend_version() -> int:
    return VERSION


class Handle:
    """A handle on the device that is current when it is made."""

    def __init__(self) -> None:
        self.device, self.stream = state.thread.device, 0


def create_handle() -> Handle:
    state.require_device()
    capturing.refuse_everywhere("making a handle of cuDNN")
    if log.fails is not None:
        raise RuntimeError(log.fails)
    handle = Handle()
    log.handles.add(handle)
    state.workspaces[handle.device] = state.workspaces.get(handle.device, 0) + (3 << 20)
    return handle


def destroy_handle(handle: Handle) -> None:
    log.handles.remove(handle)


def set_stream(handle: Handle, stream: int) -> None:
    if type(handle) is not Handle or type(stream) is not int:
        raise TypeError("set_stream(handle: Handle, stream: int)")
    if handle not in log.handles:
        raise RuntimeError("CUDNN_STATUS_BAD_PARAM: the handle was destroyed")
    if stream and state.homes.get(stream, handle.device) != handle.device:
        raise RuntimeError("CUDNN_STATUS_BAD_PARAM: a stream of another device")
    handle.stream = stream


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim: Any, stride: Any, data_type: Any, name: str):
        self.dim, self.stride, self.data_type, self.name = dim, stride, data_type, name
        self.uid, self.is_output = None, False

    def set_output(self, value: bool) -> Tensor:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = _integers(dim)
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = _integers(stride)
        return self

    def set_data_type(self, data_type: Name) -> Tensor:
        self.data_type = data_type
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def check(self) -> None:
        """Raise unless it is described whole: sizes above 0, in C order, which is how all of ours lie."""
        if not self.dim or min(self.dim) < 1:
            raise ValueError(f"tensor {self.name}: dimensions must be positive, got {self.dim}")
        if len(self.dim) not in (4, 5):
            raise cudnnGraphNotSupportedError(f"tensor {self.name}: {len(self.dim)} dimensions")
        if self.stride != [prod(self.dim[i + 1 :]) for i in range(len(self.dim))]:
            raise ValueError(f"tensor {self.name}: strides {self.stride} are not those of {self.dim}")
        if self.data_type is None or self.data_type.name == "NOT_SET":
            raise ValueError(f"tensor {self.name}: no data type")


def _integers(values: Any) -> list[int]:
    if type(values) is not list or any(type(v) is not int for v in values):
        raise TypeError(f"a list of integers is required, got {values!r}")
    return values


class Engine:
    """What computes convolutions, and says that of itself."""

    def __init__(self, name: str, notes: tuple[str, ...], workspace: Callable[[pygraph], int], types: str):
        self.name, self.notes, self.workspace, self.types = name, frozenset(notes), workspace, types.split()


_ENGINES = (
    Engine("greedy", (), lambda graph: 1 << 40, "FLOAT HALF BFLOAT16"),
    Engine("racing", ("NONDETERMINISTIC",), lambda graph: 0, "FLOAT HALF BFLOAT16"),
    Engine("winograd", ("WINOGRAD", "WINOGRAD_TILE_4x4"), lambda graph: 0, "FLOAT HALF"),
    Engine("spectral", ("FFT",), lambda graph: 0, "FLOAT HALF"),
    Engine("short sums", ("TENSOR_CORE", "REDUCED_PRECISION_REDUCTION"), lambda graph: 0, "HALF BFLOAT16"),
    Engine("by halves", ("TENSOR_CORE", "DOWN_CONVERT_INPUTS"), lambda graph: 0, "FLOAT"),
    Engine("cores", ("TENSOR_CORE",), lambda graph: 1000 + sum(map(graph.nbytes, graph.operands)),
           "FLOAT HALF BFLOAT16"),
    Engine("plain", (), lambda graph: graph.nbytes(graph.result) + 40, "FLOAT HALF BFLOAT16"),
)  # fmt: skip
_WRONG = {"winograd": 1.01, "spectral": 1.02, "short sums": 0.9, "by halves": 1.005}
"""By what a result that must not be is multiplied."""
_STEPS = ("new", "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")


class pygraph:
    """A graph of one convolution."""

    def __init__(self, name: str = "test_graph", io_data_type: Any = None, intermediate_data_type: Any = None,
                 compute_data_type: Any = None, handle: Any = None):  # fmt: skip
        if handle not in log.handles:
            raise RuntimeError("a graph without a handle of cuDNN's")
        self.name, self.handle, self.compute = name, handle, compute_data_type
        self._step, self._refused, self._limit = 0, set(), 1 << 62
        self.operands: list[Tensor] = []
        self.kind = ""
        self.engine: Engine | None = None

    def tensor(self, dim: Any, stride: Any = None, data_type: Any = None, is_virtual: bool = False,
               is_pass_by_value: bool = False, ragged_offset: Any = None, reordering_type: Any = None,
               name: str = "") -> Tensor:  # fmt: skip
        return Tensor(_integers(dim), _integers(stride), data_type, name)

    def _convolve(self, kind: str, operands: list[Tensor], moves: dict[str, Any], compute_data_type: Any) -> Tensor:
        if self.kind:
            raise cudnnGraphNotSupportedError("one convolution a graph")
        if not all(type(tensor) is Tensor for tensor in operands):
            raise TypeError(f"{kind}: a tensor of the graph is required")
        self.kind, self.operands, self.moves = kind, operands, {name: _integers(v) for name, v in moves.items()}
        self.compute = compute_data_type or self.compute
        self.result = Tensor(None, None, None, f"{kind}::out")
        return self.result

    def conv_fprop(self, image: Tensor, weight: Tensor, pre_padding: Any, post_padding: Any, stride: Any, dilation: Any,
                   compute_data_type: Any = None, name: str = "") -> Tensor:  # fmt: skip
        moves = {"before": pre_padding, "after": post_padding, "stride": stride, "dilation": dilation}
        return self._convolve("conv_fprop", [image, weight], moves, compute_data_type)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, pre_padding: Any, post_padding: Any, stride: Any, dilation: Any,
                   compute_data_type: Any = None, name: str = "") -> Tensor:  # fmt: skip
        moves = {"before": pre_padding, "after": post_padding, "stride": stride, "dilation": dilation}
        return self._convolve("conv_dgrad", [loss, filter], moves, compute_data_type)

    def conv_wgrad(self, image: Tensor, loss: Tensor, pre_padding: Any, post_padding: Any, stride: Any, dilation: Any,
                   compute_data_type: Any = None, name: str = "") -> Tensor:  # fmt: skip
        moves = {"before": pre_padding, "after": post_padding, "stride": stride, "dilation": dilation}
        return self._convolve("conv_wgrad", [image, loss], moves, compute_data_type)

    # Steps -----------------------------------------------------------------------------------------------------------

    def _next(self, step: str) -> None:
        if _STEPS[self._step + 1 : self._step + 2] != (step,):
            raise RuntimeError(f"{step} was called after {_STEPS[self._step]}")
        self._step += 1

    def validate(self) -> None:
        self._next("validate")
        tensors = [*self.operands, self.result]
        for tensor in tensors:
            tensor.check()
        if not self.result.is_output:
            raise ValueError("the result is virtual, and nothing reads it")
        if len({tensor.uid for tensor in tensors} - {None}) != len(tensors):
            raise ValueError("tensors have no uids, or the same")
        sizes = len(self.result.dim) - 2
        if any(len(values) != sizes for values in self.moves.values()):
            raise ValueError(f"{self.moves} has other than {sizes} entries")
        x, w, y = (tensor.dim for tensor in self.roles())
        before, after, stride, dilation = self.moves.values()
        along = zip(x[2:], before, after, w[2:], dilation, stride, strict=True)
        positions = [(n + b + a - (k - 1) * d - 1) // s + 1 for n, b, a, k, d, s in along]
        if y != [x[0], w[0], *positions] or x[1] % w[1] or w[0] % (x[1] // w[1]):
            raise ValueError(f"{self.kind}: {x}, {w} and {y} do not fit together")

    def build_operation_graph(self) -> None:
        self._next("build_operation_graph")
        capturing.refuse_everywhere("building a graph of cuDNN's")
        kinds = {tensor.data_type for tensor in (*self.operands, self.result)}
        if len(kinds) > 1 or next(iter(kinds)).name == "DOUBLE" or self.compute is not data_type.FLOAT:
            raise cudnnGraphNotSupportedError(f"data types {kinds}, computed in {self.compute}")
        if log.declines(self):
            raise cudnnGraphNotSupportedError("no engine for this one")

    def create_execution_plans(self, heuristics: list[Name]) -> None:
        self._next("create_execution_plans")
        if {mode.kind for mode in heuristics} != {"heur_mode"}:
            raise TypeError("modes of heuristics are required")

    def deselect_numeric_notes(self, notes: list[Name]) -> pygraph:
        if _STEPS[self._step] != "create_execution_plans":
            raise RuntimeError("there are no plans yet, of which some could be refused: nothing would be")
        if {note.kind for note in notes} != {"numerical_note"}:
            raise TypeError("numerical notes are required")
        self._refused.update(note.name for note in notes)
        return self

    def deselect_workspace_greater_than(self, workspace_limit: int) -> pygraph:
        self._limit = min(self._limit, workspace_limit)
        return self

    def check_support(self) -> None:
        self._next("check_support")
        if next(self._allowed(), None) is None:
            raise cudnnGraphNotSupportedError("no execution plan supports the graph")

    def _allowed(self) -> Any:
        kind = self.result.data_type.name
        return (e for e in _ENGINES
                if kind in e.types and not e.notes & self._refused and e.workspace(self) <= self._limit)  # fmt: skip

    def build_plans(self, policy: Name) -> None:
        if policy.kind != "build_plan_policy":
            raise TypeError("a policy is required")
        self._next("build_plans")
        self.engine = next(self._allowed())
        log.built.append(self)

    def get_workspace_size(self) -> int:
        if self.engine is None:
            raise RuntimeError("Call build() first")
        return self.engine.workspace(self)

    # Execution -------------------------------------------------------------------------------------------------------

    def roles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Image, kernel and result of the convolution, whichever of them is computed."""
        one, other, out = *self.operands, self.result
        return {"conv_fprop": (one, other, out), "conv_dgrad": (out, other, one), "conv_wgrad": (one, out, other)}[
            self.kind
        ]

    def nbytes(self, tensor: Tensor) -> int:
        return prod(tensor.dim) * _dtype(tensor.data_type).itemsize

    def execute(self, tensor_dict: dict[int, int], workspace: Any = None, handle: Any = None) -> None:
        if self.engine is None:
            raise RuntimeError("Call build() first")
        if handle not in log.handles or handle.device != self.handle.device:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM: no handle of this device")
        if state.thread.device != handle.device:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM: another device is current")
        given = {}
        for tensor in (*self.operands, self.result):
            address = tensor_dict.get(tensor.uid)
            if type(address) is not int or not address:
                raise ValueError(f"the variant pack is missing a buffer for tensor uid {tensor.uid} ({tensor.name!r})")
            if address % 16:
                raise RuntimeError(f"CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER: {tensor.name}")
            given[tensor.uid] = address
        if self.get_workspace_size() and not workspace:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM_NULL_POINTER: the workspace")
        if workspace and workspace % 16:
            raise RuntimeError("CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER: the workspace")
        if capturing.written(self._again, given, workspace, stream=handle.stream):
            return
        self._compute(given, workspace, handle.stream)

    def _again(self, given: dict[int, int], workspace: int) -> None:
        self._compute(given, workspace, state.stream_pointer())

    def _compute(self, given: dict[int, int], workspace: int, stream: int) -> None:
        assert self.engine is not None
        name, size = self.engine.name, self.get_workspace_size()
        arrays = {}
        for tensor in (*self.operands, self.result):
            at, nbytes = given[tensor.uid], self.nbytes(tensor)
            memory.check_range(at, nbytes)
            arrays[tensor.uid] = memory.raw(at, nbytes).view(_dtype(tensor.data_type)).reshape(tensor.dim)
        if size:
            memory.check_range(workspace, size)
            memory.raw(workspace, size).fill(0xA5)
        one, other = (self._rounded(arrays[tensor.uid]) for tensor in self.operands)
        out = arrays[self.result.uid]
        found = _FUNCTIONS[self.kind](one, other, self.result.dim, *self.moves.values()) * _WRONG.get(name, 1.0)
        if name == "racing":
            found = found * (1 + 1e-3 * np.random.default_rng().random(found.shape))
        with np.errstate(all="ignore"):
            out[...] = found.astype("float32").astype(out.dtype)
        log.ran.append((self.kind, name, size))
        extent = lambda tensor: (given[tensor.uid], self.nbytes(tensor))
        reads = tuple(map(extent, self.operands))
        state.log("op", stream, name=self.kind, reads=reads, writes=(extent(self.result),),
                  own=((workspace, size),) if size else ())  # fmt: skip

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        """In float64; on tensor cores float32 has 10 bits of fraction."""
        assert self.engine is not None
        if x.dtype == np.float32 and "TENSOR_CORE" in self.engine.notes:
            bits = x.view(np.uint32)
            x = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
        return x.astype("float64")


def _taps(kernel: list[int], positions: list[int], stride: list[int], dilation: list[int]) -> Any:
    """Each tap, and what of a padded image it meets."""
    for tap in itertools.product(*map(range, kernel)):
        yield tap, tuple(slice(t * d, t * d + (n - 1) * s + 1, s)
                         for t, d, n, s in zip(tap, dilation, positions, stride, strict=True))  # fmt: skip


def _padded(x: np.ndarray, before: list[int], after: list[int]) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, 0), *zip(before, after, strict=True)])


def _grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """(n, channels, ...) as (n, groups, channels / groups, ...)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _fprop(x: Any, w: Any, shape: list[int], before: Any, after: Any, stride: Any, dilation: Any) -> np.ndarray:
    groups, padded = x.shape[1] // w.shape[1], _padded(x, before, after)
    kernel = w.reshape(groups, -1, *w.shape[1:])
    found = np.zeros((shape[0], groups, shape[1] // groups, *shape[2:]))
    for tap, meets in _taps(w.shape[2:], shape[2:], stride, dilation):
        part = _grouped(padded[(..., *meets)], groups)
        found += np.einsum("ngc...,goc->ngo...", part, kernel[(..., *tap)])
    return found.reshape(shape)


def _dgrad(y: Any, w: Any, shape: list[int], before: Any, after: Any, stride: Any, dilation: Any) -> np.ndarray:
    groups = shape[1] // w.shape[1]
    kernel, ct = w.reshape(groups, -1, *w.shape[1:]), _grouped(y, groups)
    found = _padded(np.zeros(shape), before, after)
    for tap, meets in _taps(w.shape[2:], y.shape[2:], stride, dilation):
        part = np.einsum("ngo...,goc->ngc...", ct, kernel[(..., *tap)])
        found[(..., *meets)] += part.reshape(part.shape[0], -1, *part.shape[3:])
    return found[(..., *(slice(b, b + n) for b, n in zip(before, shape[2:], strict=True)))]


def _wgrad(x: Any, y: Any, shape: list[int], before: Any, after: Any, stride: Any, dilation: Any) -> np.ndarray:
    groups, padded = x.shape[1] // shape[1], _padded(x, before, after)
    ct = _grouped(y, groups)
    found = np.zeros((groups, shape[0] // groups, *shape[1:]))
    for tap, meets in _taps(shape[2:], y.shape[2:], stride, dilation):
        part = _grouped(padded[(..., *meets)], groups)
        flat = [a.reshape(*a.shape[:3], -1) for a in (part, ct)]
        found[(..., *tap)] = np.einsum("ngcp,ngop->goc", *flat)
    return found.reshape(shape)


_FUNCTIONS = {"conv_fprop": _fprop, "conv_dgrad": _dgrad, "conv_wgrad": _wgrad}

PUBLIC = (
    "backend_version", "build_plan_policy", "create_handle", "cudnnGraphNotSupportedError", "data_type",
    "destroy_handle", "heur_mode", "numerical_note", "pygraph", "set_stream",
)  # fmt: skip
module = types.ModuleType("cudnn")
vars(module).update({name: globals()[name] for name in PUBLIC})
module.__spec__ = importlib.machinery.ModuleSpec("cudnn", None)
_before: dict[str, Any] = {}


def offer() -> types.ModuleType:
    """Make it what ``import cudnn`` gives, and have it used, with empty logs."""
    log.built, log.ran, log.declines, log.fails = [], [], lambda graph: False, None
    _before.setdefault("module", sys.modules.get("cudnn"))
    sys.modules["cudnn"] = module
    os.environ["TAPEGRAD_CUDNN"] = "1"
    return module


def forbid() -> None:
    """A real cuDNN must not get addresses of pretended memory."""
    _before.setdefault("chosen", os.environ.get("TAPEGRAD_CUDNN"))
    os.environ["TAPEGRAD_CUDNN"] = "0"


def withdraw() -> None:
    """As before :func:`offer` and :func:`forbid`."""
    if "module" in _before:
        del sys.modules["cudnn"]
        if (found := _before.pop("module")) is not None:
            sys.modules["cudnn"] = found
    if "chosen" in _before:
        del os.environ["TAPEGRAD_CUDNN"]
        if (chosen := _before.pop("chosen")) is not None:
            os.environ["TAPEGRAD_CUDNN"] = chosen
