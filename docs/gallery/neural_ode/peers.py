"""The gradient of the neural differential equation (32 particles, 13 times, float64, tolerance 1e-7), beside PyTorch
(torchdiffeq) and JAX (``jax.experimental.ode``).

    python docs/gallery/neural_ode/peers.py [--rounds 7]

All solve by Dormand and Prince's method of order 5, each choosing its own steps.  ``odeint_adjoint`` and JAX solve a
second equation backwards, whose gradients are those of the true solution to the tolerance; tapegrad's and torchdiffeq's
``odeint`` are those of the numbers computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison

TOLERANCE = 1e-7


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import neural_ode as ours

    draw = np.random.default_rng(0)
    times, start, ws = np.linspace(0, ours.SECONDS, 13), draw.uniform(-2, 2, (32, 2)), ours.weights(32)
    ws = [w + 0.3 * draw.standard_normal(w.shape) for w in ws]  # as after some training
    seen = ours.true_paths(start, times)
    ours.TOLERANCE = TOLERANCE
    points, variables = tg.asarray(seen), [tg.asarray(w) for w in ws]

    def gradient(recompute: bool) -> Any:
        value, found = tg.value_and_grad(lambda ws: ours.loss(ws, points, times, recompute))(variables)
        return [np.asarray(a) for a in (value, *found)]

    def rate(lib: Any, y: Any, ws: Any) -> Any:
        return lib.tanh(lib.tanh(y @ ws[0] + ws[1]) @ ws[2] + ws[3]) @ ws[4] + ws[5]

    def in_torch(solve: str) -> Any:
        import torchdiffeq

        class Rate(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ws = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(w)) for w in ws])

            def forward(self, t: Any, y: Any) -> Any:
                return rate(torch, y, self.ws)

        module, data = Rate(), torch.tensor(seen)
        path = getattr(torchdiffeq, solve)(module, data[0], torch.tensor(times), rtol=TOLERANCE, atol=TOLERANCE)
        value = ((path - data) ** 2).mean()
        return [value.item(), *[g.numpy() for g in torch.autograd.grad(value, list(module.ws))]]

    found: comparison.Works = {
        "tapegrad, solution kept": lambda: gradient(True),
        "tapegrad, everything kept": lambda: gradient(False),
    }
    if torch is not None:
        found["PyTorch, odeint"] = lambda: in_torch("odeint")
        found["PyTorch, odeint_adjoint"] = lambda: in_torch("odeint_adjoint")
    if jax is not None:
        from jax.experimental.ode import odeint

        def loss(ws: Any) -> Any:
            path = odeint(lambda y, t, *ws: rate(jax.numpy, y, ws), seen[0], times, *ws, rtol=TOLERANCE, atol=TOLERANCE)
            return ((path - seen) ** 2).mean()

        compiled = jax.jit(jax.value_and_grad(loss)).lower(ws).compile()

        def in_jax() -> Any:
            value, gradients = compiled(ws)
            return [np.asarray(a) for a in (value, *gradients)]

        found["JAX, odeint"] = in_jax
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-3, rounds=7, warm_up=1)
