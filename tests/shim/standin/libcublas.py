"""The library of cuBLAS as a file that ctypes opens: its functions are C, which ask the stand-in's products.

A handle has a stream, where its products are put, and a workspace, which every change of streams takes away.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from typing import Any

from . import blas, capturing, state

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_MATRIX = (_POINTER, _INT, _INT, _LONG)
_SIGNATURES = (
    (ctypes.POINTER(_POINTER),), (_POINTER,), (_POINTER, _POINTER), (_POINTER, _POINTER, ctypes.c_size_t),
    (_POINTER, _INT), (_POINTER, *[_INT] * 5, _POINTER, *_MATRIX, *_MATRIX, _POINTER, *_MATRIX, *[_INT] * 3),
)  # fmt: skip

streams: dict[int, int] = {}
workspaces: dict[int, tuple[int, int]] = {}
modes: dict[int, int] = {}
#: What a call was given last, and what it raised: nothing is raised through C.
calls: list[tuple[Any, ...]] = []
failures: list[str] = []


def _told(f: Callable[..., Any]) -> Callable[..., int]:
    def call(*args: Any) -> int:
        try:
            f(*args)
        except blas.CUBLASError as e:
            return e.status
        except Exception:
            failures.append(traceback.format_exc())
            return 13
        return 0

    return call


def _create(place: Any) -> None:
    state.require_device()
    blas.require_room()
    place[0] = handle = blas.create()
    state.workspaces[state.thread.device] = state.workspaces.get(state.thread.device, 0) + state.config.workspace
    streams[handle], modes[handle] = 0, 0


def _destroy(handle: int) -> None:
    blas._modes.pop(handle)
    for known in (streams, workspaces, modes):
        known.pop(handle, None)


def _set_stream(handle: int, stream: int | None) -> None:
    streams[handle] = stream or 0
    workspaces.pop(handle, None)


def _set_workspace(handle: int, pointer: int | None, size: int) -> None:
    if (pointer or 0) % 256:
        raise blas.CUBLASError(7)
    workspaces[handle] = pointer or 0, size


def _set_mode(handle: int, mode: int) -> None:
    modes[handle] = mode


def _multiply(handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: int, at: int, lda: int, sa: int,
              b: int, bt: int, ldb: int, sb: int, beta: int, c: int, ct: int, ldc: int, sc: int, count: int,
              compute: int, algorithm: int) -> None:  # fmt: skip
    given = (
        handle,
        ta,
        tb,
        m,
        n,
        k,
        alpha,
        a,
        at,
        lda,
        sa,
        b,
        bt,
        ldb,
        sb,
        beta,
        c,
        ct,
        ldc,
        sc,
        count,
        compute,
        algorithm,
    )
    place = workspaces.get(handle)
    if capturing.written(_again, given, place, stream=streams[handle]):
        return
    calls.append((ta, tb, m, n, k, lda, sa, ldb, sb, ldc, sc, count, compute, modes[handle], at))
    blas.gemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha or 0, a or 0, at, lda, sa, b or 0, bt, ldb, sb, beta or 0,
                              c or 0, ct, ldc, sc, count, compute, algorithm, stream=streams[handle],
                              workspace=place)  # fmt: skip


def _again(given: tuple[Any, ...], place: tuple[int, int] | None) -> None:
    """A captured product, with the workspace of its capture."""
    blas.gemmStridedBatchedEx(*(0 if one is None else one for one in given), stream=state.stream_pointer(),
                              workspace=place)  # fmt: skip


_functions = (_create, _destroy, _set_stream, _set_workspace, _set_mode, _multiply)
_kept: list[Any] = []


def path() -> str:
    """The file, compiled if need be, whose functions ask these."""
    from ..build import compiled_c

    file = compiled_c("cublas.c")
    if not _kept:
        library = ctypes.CDLL(str(file))
        _kept.extend(ctypes.CFUNCTYPE(_INT, *types)(_told(f)) for f, types in zip(_functions, _SIGNATURES, strict=True))
        library.tgh_cublas(*_kept)
        _kept.append(library)
    return str(file)


def offer() -> None:
    """Let the environment name the file, where there is a compiler."""
    from ..build import why_no_compiler

    if why_no_compiler() is None:
        os.environ["TAPEGRAD_CUBLAS"] = path()


def withdraw() -> None:
    """The environment names no file any more."""
    os.environ.pop("TAPEGRAD_CUBLAS", None)
