"""The computations of ``gpu_speed.py``, written once for each library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpu_common

RATE = 0.25


@dataclass
class Case:
    """One computation: its least traffic, and a function for every library.

    ``forward`` takes ``(lib, *inputs)`` and gives one array; with ``backward`` what is timed is the gradient of its sum
    weighted by the last input, in all inputs before it.
    """

    name: str
    nbytes: int
    inputs: Callable[[], list[Any]]
    forward: dict[str, Callable]
    backward: bool = False
    by_hand: Callable | None = None
    """CuPy's gradient, which CuPy does not derive."""
    compared: bool = True
    tolerance: float = 2e-5
    dtype: str = "float32"
    """In which floats are computed; NumPy's arrays are of float32."""
    floor: float = 0.0
    """Differences count relative to this part of the largest result at least."""
    compiled: bool = True
    """Whether torch.compile is a peer."""

    def makers(self, run: gpu_common.Run) -> dict[str, Callable[[], Callable[[], list[Any]]]]:
        """By library: a function that uploads the inputs and gives the call to time."""
        arrays = self.inputs()
        calls: dict[str, Any] = {
            "tapegrad": lambda: self._tapegrad(run.tg, arrays),
            "function": lambda: self._tapegrad(run.tg, arrays, run.tg.function),
        }
        if "cupy" in self.forward:
            calls["cupy"] = lambda: self._cupy(run.cupy, arrays)
        if run.torch is not None and "torch" in self.forward:
            wanted = run.options.peers.split(",")
            if "torch" in wanted:
                calls["torch"] = lambda: self._torch(run, arrays, False)
            if "compile" in wanted and self.compiled:
                calls["compile"] = lambda: self._torch(run, arrays, True)
        if run.jax is not None and "jax" in self.forward:
            calls["jax"] = lambda: self._jax(run.jax, arrays)
        return calls

    def _tapegrad(self, tg: Any, arrays: list[Any], wrap: Callable = lambda f: f) -> Callable:
        from tapegrad.tensor import materialize

        forward = self.forward["tapegrad"]
        inputs = [tg.asarray(a) if a.dtype.kind == "i" else tg.asarray(a, dtype=self.dtype) for a in arrays]
        for x in inputs:
            materialize(x)

        def compute(*inputs: Any) -> list[Any]:
            if not self.backward:
                return [forward(tg, *inputs)]
            with tg.GradientTape() as tape:
                tape.watch(inputs[:-1])
                y = forward(tg, *inputs[:-1])
            return tape.gradient(y, inputs[:-1], output_gradients=inputs[-1])

        compute = wrap(compute)

        def call() -> list[Any]:
            results = compute(*inputs)
            for t in results:
                materialize(t)
            return results

        return call

    def _cupy(self, cupy: Any, arrays: list[Any]) -> Callable:
        inputs = [cupy.asarray(a) for a in arrays]
        if self.backward:
            return lambda: self.by_hand(cupy, *inputs)  # type: ignore[misc]
        return lambda: [self.forward["cupy"](cupy, *inputs)]

    def _torch(self, run: gpu_common.Run, arrays: list[Any], compiled: bool) -> Callable:
        torch = run.torch
        inputs = [torch.tensor(a, device=run.where) for a in arrays]
        inputs = [x.to(getattr(torch, self.dtype)) if x.is_floating_point() else x for x in inputs]
        forward = self.forward["torch"]
        f = lambda *xs: forward(torch, *xs)
        if compiled:
            torch._dynamo.reset()
            f = torch.compile(f)
        if not self.backward:
            return lambda: [f(*inputs)]
        leaves = [x.requires_grad_() for x in inputs[:-1]]
        return lambda: list(torch.autograd.grad(f(*leaves), leaves, inputs[-1]))

    def _jax(self, jax: Any, arrays: list[Any]) -> Callable:
        inputs = [jax.numpy.asarray(a, None if a.dtype.kind == "i" else self.dtype) for a in arrays]
        forward = self.forward["jax"]
        f = lambda *xs: forward(jax, *xs)
        if self.backward:
            both = jax.jit(lambda *xs: jax.vjp(f, *xs[:-1])[1](xs[-1]))
            return lambda: list(jax.block_until_ready(both(*inputs)))
        compiled = jax.jit(f)
        return lambda: [jax.block_until_ready(compiled(*inputs))]


class Adam(Case):
    """One step on a parameter, which a call changes: results are compared after the first."""

    def makers(self, run: gpu_common.Run) -> dict[str, Callable[[], Callable[[], list[Any]]]]:
        p, g = self.inputs()
        calls = {"tapegrad": lambda: self._ours(run.tg, p, g), "cupy": lambda: self._written(run.cupy, p, g)}
        if run.torch is not None and "torch" in run.options.peers.split(","):
            calls["torch"] = lambda: self._fused(run, p, g)
        return calls

    def _ours(self, tg: Any, p: Any, g: Any) -> Callable:
        variable, gradient, optimizer = tg.Variable(p), tg.asarray(g), tg.optim.Adam(1e-3)

        def call() -> list[Any]:
            optimizer.apply([gradient], [variable])
            return [variable]

        return call

    def _written(self, cupy: Any, p: Any, g: Any) -> Callable:
        p, g = cupy.array(p), cupy.asarray(g)
        m, v, step = cupy.zeros(p.shape, p.dtype), cupy.zeros(p.shape, p.dtype), 0

        def call() -> list[Any]:
            nonlocal m, v, p, step
            step += 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            rate = 1e-3 * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            p = p - rate * m / (cupy.sqrt(v) + 1e-7)
            return [p]

        return call

    def _fused(self, run: gpu_common.Run, p: Any, g: Any) -> Callable:
        torch = run.torch
        leaf = torch.tensor(p, device=run.where, requires_grad=True)
        leaf.grad = torch.tensor(g, device=run.where)
        optimizer = torch.optim.Adam([leaf], lr=1e-3, fused=True)

        def call() -> list[Any]:
            optimizer.step()
            return [leaf]

        return call


def _gelu_cupy(cp: Any, x: Any, b: Any) -> Any:
    from cupyx.scipy.special import erf

    x = x + b
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def _chain_cupy(cp: Any, x: Any) -> Any:
    return cp.tanh(x * 1.5 + 0.5) * (1 / (1 + cp.exp(-x)))


def _chain_gradient(cp: Any, x: Any, ct: Any) -> list[Any]:
    t, s = cp.tanh(x * 1.5 + 0.5), 1 / (1 + cp.exp(-x))
    return [ct * ((1 - t * t) * s * 1.5 + t * s * (1 - s))]


def _softmax_cupy(cp: Any, x: Any) -> Any:
    e = cp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _norm_cupy(cp: Any, x: Any, g: Any, b: Any) -> Any:
    c = x - x.mean(axis=-1, keepdims=True)
    return c / cp.sqrt((c * c).mean(axis=-1, keepdims=True) + 1e-5) * g + b


def _norm_jax(jax: Any, x: Any, g: Any, b: Any) -> Any:
    return _norm_cupy(jax.numpy, x, g, b)


def _torch_norm(torch: Any, x: Any, g: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], g, b, 1e-5)


def cases(elements: int, dtype: str = "float32") -> list[Case]:
    """All of them, for arrays of so many elements; CuPy and Adam only in float32."""
    if dtype == "float32":
        return _cases(elements)
    return [
        replace(case, name=f"{case.name}, {dtype}", dtype=dtype, nbytes=case.nbytes // 2, tolerance=5e-2,
                forward={who: f for who, f in case.forward.items() if who != "cupy"})
        for case in _cases(elements) if not isinstance(case, Adam)
    ]  # fmt: skip


def _cases(elements: int) -> list[Case]:
    import numpy as np

    width = min(4096, 1 << (elements.bit_length() // 2))
    rows = elements // width
    n = 4 * elements

    def drawn(*shapes: tuple[int, ...]) -> Callable[[], list[Any]]:
        def make() -> list[Any]:
            rng = np.random.default_rng(0)
            return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]

        return make

    full, row, matrix = (elements,), (width,), (rows, width)

    def labelled() -> list[Any]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal(matrix, dtype=np.float32), rng.integers(0, width, rows)]

    chain = {
        "tapegrad": lambda tg, x: tg.tanh(x * 1.5 + 0.5) * tg.sigmoid(x),
        "cupy": _chain_cupy,
        "torch": lambda torch, x: torch.tanh(x * 1.5 + 0.5) * torch.sigmoid(x),
        "jax": lambda jax, x: jax.numpy.tanh(x * 1.5 + 0.5) * jax.nn.sigmoid(x),
    }
    gelu = {
        "tapegrad": lambda tg, x, b: tg.nn.functional.gelu(x + b),
        "cupy": _gelu_cupy,
        "torch": lambda torch, x, b: torch.nn.functional.gelu(x + b),
        "jax": lambda jax, x, b: jax.nn.gelu(x + b, approximate=False),
    }
    total = lambda axis: {
        "tapegrad": lambda tg, x: tg.sum(x, axis=axis),
        "cupy": lambda cp, x: x.sum(axis=axis),
        "torch": lambda torch, x: torch.sum(x) if axis is None else torch.sum(x, dim=axis),
        "jax": lambda jax, x: jax.numpy.sum(x, axis=axis),
    }
    softmax = {
        "tapegrad": lambda tg, x: tg.softmax(x),
        "cupy": _softmax_cupy,
        "torch": lambda torch, x: torch.softmax(x, -1),
        "jax": lambda jax, x: jax.nn.softmax(x),
    }
    norm = {
        "tapegrad": lambda tg, x, g, b: tg.layer_norm(x, g, b, eps=1e-5),
        "cupy": _norm_cupy,
        "torch": _torch_norm,
        "jax": _norm_jax,
    }
    without_cupy = lambda forward: {who: f for who, f in forward.items() if who != "cupy"}
    entropy = {
        "tapegrad": lambda tg, x, labels: tg.cross_entropy(x, labels),
        "torch": lambda torch, x, labels: torch.nn.functional.cross_entropy(x, labels, reduction="none"),
        "jax": lambda jax, x, labels: -jax.numpy.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1)[:, 0],
    }
    dropout = {
        "tapegrad": lambda tg, x: tg.nn.functional.dropout(x, RATE),
        "cupy": lambda cp, x: cp.where(cp.random.random(x.shape, dtype="float32") >= RATE, x / (1 - RATE), 0),
        "torch": lambda torch, x: torch.nn.functional.dropout(x, RATE),
    }
    return [
        Case("elementwise chain", 2 * n, drawn(full), chain),
        Case("elementwise chain, gradient", 3 * n, drawn(full, full), chain, backward=True, by_hand=_chain_gradient),
        Case("bias and gelu", 2 * n, drawn(matrix, row), gelu),
        Case("bias and gelu, gradient", 3 * n, drawn(matrix, row, matrix), without_cupy(gelu), backward=True,
             tolerance=1e-4),
        Case("sum of all", n, drawn(matrix), total(None), tolerance=1e-3),
        Case("sum of rows", n, drawn(matrix), total(1)),
        Case("sum of columns", n, drawn(matrix), total(0)),
        Case("softmax", 2 * n, drawn(matrix), softmax),
        Case("softmax, gradient", 3 * n, drawn(matrix, matrix), without_cupy(softmax), backward=True, tolerance=1e-4),
        Case("layer norm", 2 * n, drawn(matrix, row, row), norm),
        Case("layer norm, gradient", 3 * n, drawn(matrix, row, row, matrix), without_cupy(norm), backward=True,
             tolerance=1e-4),
        Case("cross entropy", n, labelled, entropy),
        Case("dropout", 2 * n, drawn(full), dropout, compared=False),
        Adam("Adam, one step", 7 * n, drawn(full, full), {}),
    ]  # fmt: skip
