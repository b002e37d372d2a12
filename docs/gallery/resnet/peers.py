"""Loss and gradients of the residual network (8 blocks, batch 32, 16 x 16, float32), beside PyTorch and JAX.

    python docs/gallery/resnet/peers.py [--rounds 9]

Plain, and in less memory: tapegrad in a budget of half of what the plain step takes; PyTorch and JAX with a checkpoint
around each block (``torch.utils.checkpoint``, ``jax.checkpoint``), which is all that they offer without rewriting.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import comparison

N, CHANNELS, BLOCKS, BATCH, EPSILON = 16, 8, 4, 32, 1e-3
WARM_UP = 3


def forward(ws: Any, x: Any, convolve: Any, block: Any) -> Any:
    """Logits from weights in the order of ``trainable_variables``."""
    take = iter(ws)
    for stride in (1, 2):
        x = convolve(x, next(take), stride) + next(take)[:, None, None]
        for _ in range(BLOCKS):
            x = block(x, *[next(take) for _ in range(6)])
    return x.mean((2, 3)) @ next(take) + next(take)


def works(tg: Any, torch: Any, jax: Any, np: Any) -> comparison.Works:
    import resnet

    tg.random.seed(0)
    model = resnet.network(CHANNELS, BLOCKS)
    pictures, kinds = resnet.images(BATCH, N, seed=0)
    given = tg.asarray(pictures), tg.asarray(kinds)
    model(given[0])  # makes the weights
    draw = np.random.default_rng(0)
    for v in model.trainable_variables:  # blocks that are no identities
        v.assign_add(tg.asarray(0.05 * draw.standard_normal(v.shape).astype("float32")))
    start = [v.numpy(copy=True) for v in model.trainable_variables]

    def together(loss: Any, gradients: Any) -> Any:
        """All gradients as one: some are the small rest of large terms, and compared with their own size only noise."""
        return loss, np.concatenate([np.ravel(g) for g in gradients])

    def ours() -> Any:
        loss, gradients = resnet.loss_and_gradients(model, *given)
        return together(loss.numpy(), [g.numpy() for g in gradients])

    taken = tg.memory.predict_peak(lambda: resnet.loss_and_gradients(model, *given), budgets=[], least=False)

    calls, alive = itertools.count(), 0

    def in_half() -> Any:
        nonlocal alive
        if next(calls) < WARM_UP:  # until the captured step has its arena, which a budget counts as well
            with tg.measure() as m:
                alive = m.live_bytes
        with tg.memory_budget(alive + (taken.peak_bytes - taken.live_bytes) // 2):
            return ours()

    captured = tg.function(lambda x, kinds: resnet.loss_and_gradients(model, x, kinds))

    def replayed() -> Any:
        loss, gradients = captured(*given)
        return together(loss.numpy(), [g.numpy() for g in gradients])

    def of_block(convolve: Any, norm: Any, relu: Any) -> Any:
        def block(x: Any, *ws: Any) -> Any:
            h = convolve(relu(norm(x, *ws[:2])), ws[2], 1)
            return x + convolve(relu(norm(h, *ws[3:5])), ws[5], 1)

        return block

    def in_torch(checkpointed: bool) -> Any:
        from torch.utils.checkpoint import checkpoint

        functional = torch.nn.functional

        def convolve(x: Any, w: Any, stride: int) -> Any:
            if stride == 1:
                return functional.conv2d(x, w, padding=1)
            return functional.conv2d(functional.pad(x, (0, 1, 0, 1)), w, stride=2)

        norm = lambda x, gamma, beta: functional.group_norm(x, 4, gamma, beta, EPSILON)
        block = of_block(convolve, norm, torch.relu)
        outer = (lambda *xs: checkpoint(block, *xs, use_reentrant=False)) if checkpointed else block
        ws = [torch.tensor(w).requires_grad_() for w in start]
        loss = functional.cross_entropy(forward(ws, torch.tensor(pictures), convolve, outer), torch.tensor(kinds))
        return together(loss.item(), [g.numpy() for g in torch.autograd.grad(loss, ws)])

    def in_jax(checkpointed: bool) -> Any:
        jnp = jax.numpy

        def convolve(x: Any, w: Any, stride: int) -> Any:
            return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME")

        def norm(x: Any, gamma: Any, beta: Any) -> Any:
            groups = x.reshape(len(x), 4, -1)
            mean, variance = groups.mean(2, keepdims=True), groups.var(2, keepdims=True)
            even = ((groups - mean) * jax.lax.rsqrt(variance + EPSILON)).reshape(x.shape)
            return even * gamma[:, None, None] + beta[:, None, None]

        block = of_block(convolve, norm, jax.nn.relu)
        outer = jax.checkpoint(block) if checkpointed else block

        def loss(ws: Any) -> Any:
            logits = jax.nn.log_softmax(forward(ws, pictures, convolve, outer))
            return -jnp.take_along_axis(logits, kinds[:, None], 1).mean()

        compiled = jax.jit(jax.value_and_grad(loss)).lower(start).compile()

        def run() -> Any:
            return together(*compiled(start))

        return run

    found: comparison.Works = {
        "tapegrad, half the memory": in_half, "tapegrad, plain": ours, "tapegrad, captured": replayed,
    }  # fmt: skip
    if torch is not None:
        found["PyTorch, plain"] = lambda: in_torch(False)
        found["PyTorch, blocks checkpointed"] = lambda: in_torch(True)
    if jax is not None:
        found["JAX, plain"] = in_jax(False)
        found["JAX, blocks checkpointed"] = in_jax(True)
    return found


if __name__ == "__main__":
    comparison.compare(__doc__, works, 1e-4, rounds=9, warm_up=WARM_UP)
