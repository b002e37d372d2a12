"""Arrays of other libraries (PyTorch's, JAX's, Numba's) in CUDA memory, seen as CuPy arrays without a copy.

DLPack comes first: its consumer names a stream, CuPy's current one, and the producer makes that stream wait for the
array.  An array that has no DLPack, or cannot export by it, is asked for ``__cuda_array_interface__``.  There version 3
names the producer's stream, for which the current one waits on the device (the host does not), or None, where nothing
is to be waited for; older versions name none, and the legacy default stream is waited for, on which most work.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tapegrad.device.types import Namespace
from tapegrad.errors import NotATensorError

_CUDA, _MANAGED = 2, 13  # DLDeviceType
_LEGACY = 1  # cudaStreamLegacy
_REFUSALS = (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError)


def index(x: object) -> int | None:
    """The number of the CUDA device in whose memory the array ``x``, of any library, lies; None if it does not."""
    if hasattr(x, "__dlpack_device__"):
        kind, number = x.__dlpack_device__()
        return int(number) if kind in (_CUDA, _MANAGED) else None
    return 0 if _has_interface(x) else None


def _has_interface(x: object) -> bool:
    """Whether there is a ``__cuda_array_interface__``, even one that raises, since the user must see its error."""
    try:
        return hasattr(x, "__cuda_array_interface__")
    except Exception:
        return True


def refuse_gradients(x: object) -> None:
    """Raises NotATensorError if another library records what is computed with ``x``: no gradient would reach it."""
    if getattr(x, "requires_grad", None) is True:
        raise NotATensorError(
            f"asarray: this {type(x).__module__}.{type(x).__name__} requires gradients, which would not pass from here "
            "to there; hand in x.detach(), and join the two tapes by hand if you want gradients of both"
        )


def imported(xp: Namespace, x: object) -> Any:
    """``x`` as a CuPy array on its own memory, which what runs next on the current stream may read.

    Raises NotATensorError naming why neither protocol serves.
    """
    refuse_gradients(x)
    why: list[Exception] = []
    if hasattr(x, "__dlpack__"):
        try:
            return xp.from_dlpack(x)
        except _REFUSALS as e:
            why.append(e)
    if _has_interface(x):
        try:
            return _by_interface(xp, x)
        except _REFUSALS as e:
            why.append(e)
    reasons = "; ".join(f"{type(e).__name__}: {e}" for e in why)
    raise NotATensorError(
        f"asarray: CuPy cannot take this {type(x).__module__}.{type(x).__name__} in CUDA memory ({reasons}); convert "
        "it to a dense array of numbers first"
    ) from why[0]


def _by_interface(xp: Namespace, x: Any) -> Any:
    face = x.__cuda_array_interface__
    # CuPy would make the host wait for the stream; an event is enough.
    array = xp.asarray(SimpleNamespace(__cuda_array_interface__={**face, "stream": None}, owner=x))
    stream = face.get("stream") if face.get("version", 0) >= 3 else _LEGACY
    if stream is not None:
        with array.device:
            event = xp.cuda.Event(disable_timing=True)
            xp.cuda.runtime.eventRecord(event.ptr, stream or _LEGACY)
            xp.cuda.get_current_stream().wait_event(event)
    return array
