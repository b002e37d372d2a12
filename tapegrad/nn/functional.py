"""What layers are made of, under torch.nn.functional's names, arguments and defaults, and JAX' and Chainer's beside it.

Losses return a scalar by default (``reduction="mean"``); ``"sum"`` and ``"none"`` are the others.  Images are
(n, channels, sizes ...).  PyTorch's arguments that write into an operand (``inplace``) or are
deprecated are not there.
"""

from __future__ import annotations

from tapegrad.nn import (
    activations,
    activations_other,
    distances,
    dropping,
    functional_adaptive,
    functional_attention,
    functional_conv,
    functional_norm,
    functional_pool,
    linear_maps,
    losses,
    losses_margin,
    losses_regression,
    losses_sampled,
    losses_sequence,
    rearranging,
    recurrent,
    regions,
    renormalizing,
    resampling,
    sampling,
)
from tapegrad.nn.activations import *  # noqa: F403
from tapegrad.nn.activations import activation
from tapegrad.nn.activations_other import *  # noqa: F403
from tapegrad.nn.distances import *  # noqa: F403
from tapegrad.nn.dropping import *  # noqa: F403
from tapegrad.nn.functional_adaptive import *  # noqa: F403
from tapegrad.nn.functional_attention import *  # noqa: F403
from tapegrad.nn.functional_attention import attention_weights
from tapegrad.nn.functional_conv import *  # noqa: F403
from tapegrad.nn.functional_norm import *  # noqa: F403
from tapegrad.nn.functional_pool import *  # noqa: F403
from tapegrad.nn.linear_maps import *  # noqa: F403
from tapegrad.nn.losses import *  # noqa: F403
from tapegrad.nn.losses_margin import *  # noqa: F403
from tapegrad.nn.losses_regression import *  # noqa: F403
from tapegrad.nn.losses_sampled import *  # noqa: F403
from tapegrad.nn.losses_sequence import *  # noqa: F403
from tapegrad.nn.rearranging import *  # noqa: F403
from tapegrad.nn.recurrent import *  # noqa: F403
from tapegrad.nn.regions import *  # noqa: F403
from tapegrad.nn.renormalizing import *  # noqa: F403
from tapegrad.nn.resampling import *  # noqa: F403
from tapegrad.nn.sampling import *  # noqa: F403

__all__ = ["activation", "attention_weights"]
for _part in (
    activations, activations_other, distances, dropping, functional_adaptive, functional_attention, functional_conv,
    functional_norm, functional_pool, linear_maps, losses, losses_margin, losses_regression, losses_sampled,
    losses_sequence, rearranging, recurrent, regions, renormalizing, resampling, sampling,
):  # fmt: skip
    __all__ += _part.__all__
