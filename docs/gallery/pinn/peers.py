"""Loss and gradient of the physics-informed network (1,024 points, 3 layers of 32, float64), beside PyTorch and JAX.

    python docs/gallery/pinn/peers.py [--rounds 15]

All go forwards twice and then in reverse.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import pinn

    x = np.random.default_rng(0).random((1024, 2))
    wanted, start = pinn.right_side(x), pinn.weights(32, 3, seed=1)
    gradient = tg.value_and_grad(pinn.loss)
    given = [tg.asarray(w) for w in start], tg.asarray(x), tg.asarray(wanted)
    captured = tg.function(gradient)
    fitted = tg.function(gradient, budget=7_000_000)  # about half of the arena and the weights

    def flat(found: Any) -> Any:
        value, gradients = found
        return [np.asarray(a) for a in (value, *gradients)]

    def network(lib: Any, ws: Any, x: Any) -> Any:
        h = x
        for matrix, bias in zip(ws[:-2:2], ws[1:-2:2], strict=True):
            h = lib.tanh(h @ matrix + bias)
        return (x * (1 - x)).prod(1) * (h @ ws[-2] + ws[-1])[:, 0]

    def loss(lib: Any, jvp: Any, along: Any, ws: Any, x: Any, wanted: Any) -> Any:
        u = lambda x: network(lib, ws, x)
        second = lambda d: jvp(lambda x: jvp(u, (x,), (d,))[1], (x,), (d,))[1]
        return ((second(along[0]) + second(along[1]) + wanted) ** 2).mean()

    directions = [np.broadcast_to(axis, x.shape).copy() for axis in pinn.AXES]

    def in_torch() -> Any:
        along, points, right = [torch.tensor(d) for d in directions], torch.tensor(x), torch.tensor(wanted)
        ws = [torch.tensor(w).requires_grad_() for w in start]
        value = loss(torch, torch.func.jvp, along, ws, points, right)
        return flat((value.detach(), torch.autograd.grad(value, ws)))

    found: comparison.Works = {
        "tapegrad, captured": lambda: flat(captured(*given)),
        "tapegrad, captured in half": lambda: flat(fitted(*given)),
        "tapegrad, eager": lambda: flat(gradient(*given)),
    }
    if torch is not None:
        found["PyTorch, eager"] = in_torch
    if jax is not None:
        both = jax.value_and_grad(lambda ws: loss(jax.numpy, jax.jvp, directions, ws, x, wanted))
        compiled = jax.jit(both).lower(start).compile()
        found["JAX, jitted"] = lambda: flat(compiled(start))
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-9, rounds=15, warm_up=3)
