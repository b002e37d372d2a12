"""What layers are made of, under torch.nn.functional's names, arguments and defaults, and JAX' and Chainer's beside it.

Losses return a scalar by default (``reduction="mean"``); ``"sum"`` and ``"none"`` are the others.  Images are
(n, channels, sizes ...).  PyTorch's arguments that write into an operand (``inplace``) or are
deprecated are not there.
"""

from __future__ import annotations

from tapegrad.nn.functional import (
    activations,
    adaptive,
    attention,
    conv,
    dropouts,
    linear_maps,
    norm,
    pool,
    rearranging,
    recurrent,
    regions,
    renormalizing,
    resampling,
    sampling,
)
from tapegrad.nn.functional.activations import *  # noqa: F403
from tapegrad.nn.functional.activations import activation
from tapegrad.nn.functional.adaptive import *  # noqa: F403
from tapegrad.nn.functional.attention import *  # noqa: F403
from tapegrad.nn.functional.attention import attention_weights
from tapegrad.nn.functional.conv import *  # noqa: F403
from tapegrad.nn.functional.dropouts import *  # noqa: F403
from tapegrad.nn.functional.linear_maps import *  # noqa: F403
from tapegrad.nn.functional.norm import *  # noqa: F403
from tapegrad.nn.functional.pool import *  # noqa: F403
from tapegrad.nn.functional.rearranging import *  # noqa: F403
from tapegrad.nn.functional.recurrent import *  # noqa: F403
from tapegrad.nn.functional.regions import *  # noqa: F403
from tapegrad.nn.functional.renormalizing import *  # noqa: F403
from tapegrad.nn.functional.resampling import *  # noqa: F403
from tapegrad.nn.functional.sampling import *  # noqa: F403
from tapegrad.nn.losses import classification, distances, margin, regression, sampled, sequence
from tapegrad.nn.losses.classification import *  # noqa: F403
from tapegrad.nn.losses.distances import *  # noqa: F403
from tapegrad.nn.losses.margin import *  # noqa: F403
from tapegrad.nn.losses.regression import *  # noqa: F403
from tapegrad.nn.losses.sampled import *  # noqa: F403
from tapegrad.nn.losses.sequence import *  # noqa: F403
from tapegrad.spellings import explain

__all__ = ["activation", "attention_weights"]
for _part in (
    activations, distances, dropouts, adaptive, attention, conv,
    norm, pool, linear_maps, classification, margin, regression, sampled,
    sequence, rearranging, recurrent, regions, renormalizing, resampling, sampling,
):  # fmt: skip
    __all__ += _part.__all__
explain(globals(), __name__)
