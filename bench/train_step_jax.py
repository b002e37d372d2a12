"""The training step of ``train_step.py`` in JAX: loss, gradients and Adam's update in one jitted function."""

from __future__ import annotations

from typing import Any

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


class TheirsInJax:
    """The demo's model with attention written out, which XLA fuses as it finds good; weights stay on its device."""

    def __init__(self, jax: Any, options: Any, weights: dict[str, Any], tokens: Any, labels: Any, rate: float) -> None:
        self.jax, self.options, self.rate = jax, options, rate
        self._names = list(weights)  # JAX sorts the keys of what a function returns
        self.weights = {name: jax.numpy.array(w) for name, w in weights.items()}
        self.tokens, self.labels = jax.numpy.array(tokens), jax.numpy.array(labels)
        zeros = {name: jax.numpy.zeros_like(w) for name, w in self.weights.items()}
        self._state = zeros, dict(zeros), jax.numpy.zeros((), "int32")
        self._both = jax.jit(jax.value_and_grad(self.loss))
        self._step = jax.jit(self._stepped)

    def loss(self, w: dict[str, Any], tokens: Any, labels: Any) -> Any:
        jax, jnp, options = self.jax, self.jax.numpy, self.options
        b, t = tokens.shape
        before = jnp.tril(jnp.ones((t, t), bool))

        def norm(x: Any, name: str) -> Any:
            mean = x.mean(-1, keepdims=True)
            centered = x - mean
            variance = (centered * centered).mean(-1, keepdims=True)
            return centered * jax.lax.rsqrt(variance + 1e-5) * w[f"{name}.gamma"] + w[f"{name}.beta"]

        def dense(x: Any, name: str) -> Any:
            return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]

        def attention(x: Any, i: int) -> Any:
            parts = (dense(x, f"{i}.{part}") for part in ("query", "key", "value"))
            q, k, v = (p.reshape(b, t, options.heads, -1).swapaxes(1, 2) for p in parts)
            scores = (q @ k.swapaxes(2, 3)) * q.shape[-1] ** -0.5
            heads = jax.nn.softmax(jnp.where(before, scores, -1e9)) @ v
            return dense(heads.swapaxes(1, 2).reshape(b, t, -1), f"{i}.output")

        x = w["characters"][tokens] + w["positions"][:t]
        for i in range(options.blocks):
            x = x + attention(norm(x, f"{i}.norm_1"), i)
            inner = jax.nn.gelu(dense(norm(x, f"{i}.norm_2"), f"{i}.expand"), approximate=False)
            x = x + dense(inner, f"{i}.contract")
        logits = jax.nn.log_softmax(norm(x, "norm") @ w["head.kernel"])
        return -jnp.take_along_axis(logits, labels[..., None], -1).mean()

    def _stepped(self, weights: Any, state: Any, tokens: Any, labels: Any) -> Any:
        jnp = self.jax.numpy
        loss, gradients = self.jax.value_and_grad(self.loss)(weights, tokens, labels)
        first, second, count = state
        count = count + 1
        rate = self.rate / (1 - BETA_1**count)
        scale = jnp.sqrt(1 - BETA_2**count)
        first = {n: BETA_1 * first[n] + (1 - BETA_1) * g for n, g in gradients.items()}
        second = {n: BETA_2 * second[n] + (1 - BETA_2) * g * g for n, g in gradients.items()}
        weights = {
            n: w - rate * first[n] / (jnp.sqrt(second[n]) / scale + EPSILON) for n, w in weights.items()
        }  # fmt: skip
        return loss, weights, (first, second, count)

    def gradients(self) -> tuple[Any, list[Any]]:
        loss, found = self._both(self.weights, self.tokens, self.labels)
        return loss, [found[name] for name in self._names]

    def step(self) -> float:
        loss, self.weights, self._state = self._step(self.weights, self._state, self.tokens, self.labels)
        return float(loss)
