"""The gradient of one shot of the inversion (200 x 200 cells, 400 steps, float64), beside PyTorch and JAX.

    python docs/gallery/full_waveform_inversion/peers.py [--rounds 7]

PyTorch keeps everything, or the states of 20 segments (``torch.utils.checkpoint``); JAX scans 20 segments of 20 steps
under ``jax.checkpoint``, or keeps everything.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison

N, STEPS, SEGMENT = 200, 400, 20


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import full_waveform_inversion as fwi

    from tapegrad import distributed as dist

    dist.init()
    survey = fwi.Survey(N, STEPS, 1, dist.Grid((1, 1)))
    even, traces = tg.asarray(np.ones((N, N))), survey.observed(tg.asarray(fwi.true_field(N)), 0)
    heard, pulse, source = traces.numpy(), survey.pulse.numpy(), survey.sources[0].numpy()
    receivers = tuple(i.numpy() for i in survey.receivers)

    def after(v: Any, u: Any, before: Any, squares: Any, source: Any, p: Any) -> Any:
        around = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4.0 * u
        return 2.0 * u - before + fwi.DT2 * squares * around + p * source

    def in_torch(segment: int) -> Any:
        from torch.utils.checkpoint import checkpoint

        squares = torch.ones(N, N, dtype=torch.float64, requires_grad=True)
        where, at = torch.tensor(source), tuple(torch.tensor(i) for i in receivers)

        def steps(u: Any, before: Any, misfit: Any, pulses: Any, seen: Any) -> Any:
            for p, d in zip(pulses, seen, strict=True):
                u, before = after(torch.nn.functional.pad(u, (1, 1, 1, 1)), u, before, squares, where, p), u
                misfit = misfit + ((u[at] - d) ** 2).sum()
            return u, before, misfit

        state = (torch.zeros_like(squares), torch.zeros_like(squares), torch.zeros((), dtype=torch.float64))
        for part in zip(torch.tensor(pulse).split(segment), torch.tensor(heard).split(segment), strict=True):
            state = steps(*state, *part) if segment == STEPS else checkpoint(steps, *state, *part, use_reentrant=False)
        state[2].backward()
        return state[2].item(), squares.grad.numpy()

    def in_jax(segment: int) -> Any:
        jnp = jax.numpy

        def whole(squares: Any) -> Any:
            def step(state: Any, given: Any) -> Any:
                u, before, misfit = state
                wave = after(jnp.pad(u, 1), u, before, squares, source, given[0])
                return (wave, u, misfit + ((wave[receivers] - given[1]) ** 2).sum()), None

            steps = lambda state, given: jax.lax.scan(step, state, given)
            zero = jnp.zeros((N, N))
            given = pulse.reshape(-1, segment), heard.reshape(-1, segment, heard.shape[1])
            body = steps if segment == STEPS else jax.checkpoint(steps)
            return jax.lax.scan(body, (zero, zero, jnp.zeros(())), given)[0][2]

        compiled = jax.jit(jax.value_and_grad(whole)).lower(even.numpy()).compile()
        return lambda: [np.asarray(x) for x in compiled(even.numpy())]

    shot = even, survey.sources[0], traces
    kept = tg.function(lambda *shot: survey.gradient(*shot, plain=True))
    found: comparison.Works = {
        "tapegrad, 16 states, captured": lambda: [x.numpy() for x in survey.captured(*shot)[:2]],
        "tapegrad, everything kept, captured": lambda: [x.numpy() for x in kept(*shot)[:2]],
        "tapegrad, 16 states": lambda: [x.numpy() for x in survey.gradient(*shot)[:2]],
        "tapegrad, everything kept": lambda: [x.numpy() for x in survey.gradient(*shot, plain=True)[:2]],
    }
    if torch is not None:
        found["PyTorch, everything kept"] = lambda: in_torch(STEPS)
        found["PyTorch, 20 checkpoints"] = lambda: in_torch(SEGMENT)
    if jax is not None:
        found["JAX, everything kept"] = in_jax(STEPS)
        found["JAX, 20 checkpoints"] = in_jax(SEGMENT)
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-9, rounds=5, warm_up=1)
