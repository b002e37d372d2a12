"""Frames of this package's that count as calls of the program's: layers and checkpoints."""

from __future__ import annotations

from types import CodeType, FrameType

from tapegrad.memory.checkpoint.recompute import Recompute
from tapegrad.memory.ledger.frames import CHECKPOINT, LAYER, Special, code_of
from tapegrad.nn import Layer


def _layer(frame: FrameType) -> tuple[int, str, CodeType | None]:
    layer = type(frame.f_locals["self"])
    return LAYER, layer.__qualname__, code_of(layer.call)


def _checkpoint(frame: FrameType) -> tuple[int, str, CodeType | None]:
    f = frame.f_locals["self"].__wrapped__
    name = getattr(f, "__qualname__", type(f).__qualname__)
    return CHECKPOINT, f"recompute_grad({name})", code_of(f.call if isinstance(f, Layer) else f)


def special() -> Special:
    """By the id of their code: what the frames of ``Layer.__call__`` and of checkpointed runs are calls of."""
    codes = ((Layer.__call__.__code__, _layer), (Recompute._run.__code__, _checkpoint))
    return {id(code): (code, describe) for code, describe in codes}
