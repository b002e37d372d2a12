"""Attention of several heads (Vaswani et al., "Attention is all you need", 2017) under Keras' names."""

from __future__ import annotations

from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks, functional, initializers
from tapegrad.nn.functional.attention import attended
from tapegrad.nn.layers.core import Dense
from tapegrad.nn.layers.layer import Layer
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


class MultiHeadAttention(Layer):
    """Every query position takes a weighted mean of the values: weights by softmax of query times key.

    query: (b, t, d), value: (b, s, e), key: (b, s, f), by default value; result: (b, t, output_shape or d).
    attention_mask: anything that broadcasts to (b, t, s), true where a query may look; ``use_causal_mask``: query i
    looks at keys 0 to i.  A query that may look nowhere gets the mean of all values, as in Keras.  The sublayers
    ``query_dense, key_dense, value_dense`` (to heads times key_dim or value_dim) and ``output_dense`` hold the weights.

    Raises ShapeError where query, value, key or mask do not fit together.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | None = None,
        *,
        kernel_initializer: str | initializers.Initializer = "glorot_uniform",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.num_heads = checks.positive(self, "num_heads", num_heads)
        self.key_dim = checks.positive(self, "key_dim", key_dim)
        self.value_dim = self.key_dim if value_dim is None else checks.positive(self, "value_dim", value_dim)
        self.output_shape = output_shape
        self.dropout = checks.rate(self, dropout)

        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.query_dense = self._projection(num_heads * self.key_dim, "query")
        self.key_dense = self._projection(num_heads * self.key_dim, "key")
        self.value_dense = self._projection(num_heads * self.value_dim, "value")
        self.output_dense = None if output_shape is None else self._projection(output_shape, "output")

    def build(self, input_shape: Any) -> None:
        if len(input_shape) != 3:
            raise ShapeError(f"{self}: wanted query (batch, positions, features), got {input_shape}")
        if self.output_dense is None:
            self.output_dense = self._projection(input_shape[-1], "output")

    def call(
        self,
        query: TensorLike,
        value: TensorLike | None = None,
        key: TensorLike | None = None,
        attention_mask: TensorLike | None = None,
        return_attention_scores: bool = False,
        training: bool = False,
        use_causal_mask: bool = False,
    ) -> Any:
        query = ops.asarray(query)
        value = query if value is None else ops.asarray(value)
        key = value if key is None else ops.asarray(key)
        self._check(query, value, key)
        q = self.query_dense(query, heads=self.num_heads)
        k, v = self.key_dense(key, heads=self.num_heads), self.value_dense(value, heads=self.num_heads)
        mask = None if attention_mask is None else self._mask(attention_mask, query, key)
        rate, weights = self.dropout if training else 0.0, None
        if return_attention_scores:
            weights = functional.attention_weights(q, k, mask, is_causal=use_causal_mask)
            y = ops.matmul(functional.dropout(weights, rate), v)
        else:
            y = attended(q, k, v, mask, is_causal=use_causal_mask, p=rate)
        heads = ops.permute_dims(y, (0, 2, 1, 3))
        b, t = query.shape[:2]
        assert self.output_dense is not None  # build has made it
        result = self.output_dense(ops.reshape(heads, (b, t, self.num_heads * self.value_dim)))
        return (result, weights) if return_attention_scores else result

    def _projection(self, units: int, part: str) -> Dense:
        return Dense(
            units,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            name=f"{self.name}/{part}",
            dtype=self.dtype,
        )

    def _check(self, query: Tensor, value: Tensor, key: Tensor) -> None:
        for role, x in (("query", query), ("value", value), ("key", key)):
            if x.ndim != 3:
                raise ShapeError(f"{self}: wanted {role} (batch, positions, features), got {x.shape}")
        if key.shape[:2] != value.shape[:2] or query.shape[0] != value.shape[0]:
            raise ShapeError(
                f"{self}: wanted query (b, t, d), value (b, s, e), key (b, s, f); "
                f"got {query.shape}, {value.shape}, {key.shape}"
            )

    def _mask(self, mask: TensorLike, query: Tensor, key: Tensor) -> Tensor:
        """The mask as booleans (b or 1, 1, t or 1, s or 1)."""
        mask = ops.astype(ops.asarray(mask), "bool")
        b, t, s = query.shape[0], query.shape[1], key.shape[1]
        shape = (1,) * (3 - mask.ndim) + tuple(mask.shape)
        if len(shape) != 3 or any(n not in (1, want) for n, want in zip(shape, (b, t, s))):
            raise ShapeError(f"{self}: wanted a mask that broadcasts to ({b}, {t}, {s}), got {mask.shape}")
        return ops.reshape(mask, (shape[0], 1, *shape[1:]))
