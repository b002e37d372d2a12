"""What a launched kernel costs on the host: calls of Python functions of the package, whatever the stand-in adds."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from shim import standin

import tapegrad as tg

PACKAGE = str(Path(tg.__file__).parent)
MOST = 74
"""Calls a launched kernel, calls of cuBLAS not counted among these.  (Of a program that once took 193 for each of 30;
now fewer kernels share fewer calls than 54 for each of 30.)"""


def step(device: Any) -> Callable[[], Any]:
    """Three blocks of layer norm and two products, forward and gradient."""
    rng = np.random.default_rng(0)
    width, wide = 64, 256
    shapes = ((width,), (width,), (width, wide), (wide,), (wide, width), (width,))
    draw = lambda *shape: tg.asarray(rng.normal(size=shape).astype("float32") * 0.1, device=device)
    x, blocks = draw(32, width), [[draw(*shape) for shape in shapes] for _ in range(3)]
    weights = [w for block in blocks for w in block]

    def run() -> Any:
        with tg.GradientTape() as tape:
            for w in weights:
                tape.watch(w)
            h = x
            for gamma, beta, w1, b1, w2, b2 in blocks:
                u = tg.nn.functional.layer_norm(h, (width,), gamma, beta)
                u = tg.nn.functional.gelu(u @ w1 + b1)
                h = h + (u @ w2 + b2)
            loss = tg.mean(h * h)
        return tape.gradient(loss, weights)

    return run


def calls(run: Callable[[], Any]) -> Counter[str]:
    """How often each function of the package is called."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_name}"] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_calls_a_launched_kernel(cuda: Any) -> None:
    run = step(cuda)
    run()
    run()
    standin.launches.clear()
    found = calls(run)
    assert len(standin.launches) == 22
    assert found.total() <= MOST * 22, found.most_common(40)


def test_a_stream_is_asked_for_no_more_than_once_for_what_it_is_given(cuda: Any, cupy: Any, monkeypatch: Any) -> None:
    """An allocation, a kernel, a work: each looks at the current stream once."""
    run = step(cuda)
    run()
    asked, of = [0], cuda._stream_of

    def noting() -> Any:
        asked[0] += 1
        return of()

    monkeypatch.setattr(cuda, "_stream_of", noting)
    standin.events.clear()
    found = calls(run)
    kinds = Counter(event.kind for event in standin.events)
    works = sum(n for name, n in found.items() if name.startswith("/engine/make.py") and name.endswith(" run"))
    assert asked[0] <= kinds["malloc"] + kinds["launch"] + works  # once for all arrays of a work
