"""``autograd.misc``: structures as vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest

from .._values import holds_tensor, plain, tensor


def flatten(value: Any) -> tuple[Any, Any]:
    leaves = [x if isinstance(x, tg.Tensor) else np.asarray(x) for x in nest.leaves(value)]
    flat = [x.reshape(-1) for x in leaves]
    vector = tg.concat([tensor(x) for x in flat]) if holds_tensor(flat) else np.concatenate([np.zeros(0), *flat])

    def unflatten(vector: Any) -> Any:
        parts, first = [], 0
        for x in leaves:
            parts.append(vector[first : first + x.size].reshape(x.shape)[()])
            first += x.size
        return nest.rebuild(value, iter(parts))

    return plain(vector), unflatten


def const_graph(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("tapegrad has no constant graphs")
