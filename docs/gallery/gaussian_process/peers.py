"""A whole HMC trajectory of the Gaussian process (100 points, 11 gradients, float64), beside PyTorch and JAX.

    python docs/gallery/gaussian_process/peers.py [--rounds 15]

The momenta are given, so that all go the same way; JAX's trajectory is jitted, tapegrad's captured and run eagerly.
``POINTS=500 LEAPS=0`` in the environment: of so many points, so many steps; of none, one gradient.  ``CHAINS=4``: so
many chains together under ``vmap``, without PyTorch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison

POINTS, LEAPS, CHAINS = (int(os.environ.get(name, n)) for name, n in {"POINTS": 100, "LEAPS": 10, "CHAINS": 1}.items())


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import gaussian_process as gp

    posterior = gp.Posterior(POINTS)
    start, momenta = gp.TRUE, np.array([0.3, -0.5, 0.2])
    if CHAINS > 1:
        apart = np.random.default_rng(0).standard_normal((CHAINS, 3))
        start, momenta = start + 0.05 * apart, momenta * apart

    def leapfrog(gradient: Any, place: Any, speed: Any) -> Any:
        speed = speed + 0.5 * gp.PACE * gradient(place)
        for leap in range(LEAPS):
            place = place + gp.PACE * speed
            speed = speed + (gp.PACE if leap < LEAPS - 1 else 0.5 * gp.PACE) * gradient(place)
        return place, speed

    def one(place: Any, speed: Any) -> Any:
        return leapfrog(tg.grad(posterior.log_density), place, speed)

    ours = tg.vmap(one) if CHAINS > 1 else one
    captured, tensors = tg.function(ours), [tg.asarray(start), tg.asarray(momenta)]

    def in_torch() -> Any:
        squares, y = torch.tensor(posterior.squares), torch.tensor(posterior.y)

        def log_density(scales: Any) -> Any:
            factor = torch.linalg.cholesky(gp.covariance(torch, scales, squares))
            white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
            return -0.5 * (white**2).sum() - factor.diagonal().log().sum() - 0.5 * ((scales + 1) ** 2).sum()

        def gradient(scales: Any) -> Any:
            scales = scales.detach().requires_grad_()
            return torch.autograd.grad(log_density(scales), scales)[0]

        return [x.numpy() for x in leapfrog(gradient, torch.tensor(start), torch.tensor(momenta))]

    def log_density_in_jax(scales: Any) -> Any:
        jnp = jax.numpy
        factor = jnp.linalg.cholesky(gp.covariance(jnp, scales, posterior.squares))
        white = jax.scipy.linalg.solve_triangular(factor, posterior.y, lower=True)
        return -0.5 * (white**2).sum() - jnp.log(jnp.diag(factor)).sum() - 0.5 * ((scales + 1) ** 2).sum()

    found: comparison.Works = {
        "tapegrad, captured": lambda: [x.numpy() for x in captured(*tensors)],
        "tapegrad, eager": lambda: [x.numpy() for x in ours(*tensors)],
    }
    if torch is not None and CHAINS == 1:
        found["PyTorch, eager"] = in_torch
    if jax is not None:
        gradient = jax.grad(log_density_in_jax)
        step = lambda p, s: leapfrog(gradient, p, s)
        compiled = jax.jit(jax.vmap(step) if CHAINS > 1 else step).lower(start, momenta).compile()
        found["JAX, jitted"] = lambda: [np.asarray(x) for x in compiled(start, momenta)]
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-7, rounds=15, warm_up=3)
