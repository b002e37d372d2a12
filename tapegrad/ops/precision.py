"""``autocast`` and its policy: which operations compute in half precision, and which in float32; and the precision of
float32 products.

The tables follow PyTorch's lists for CUDA in meaning (its "Automatic Mixed Precision package"): products, which tensor
cores make fast and which sum in float32, take half operands; what adds up many numbers, or leaves the range of
half precision, takes float32.  An operation in neither table computes in the dtype that its operands promote to.  The
names are those by which operations call themselves (``promote``, ``tensor``, ``operands``): mostly their public ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import ParamSpec, TypeVar

from tapegrad.core import state
from tapegrad.core.state import during
from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DomainError, DTypeError
from tapegrad.tensor import DTypeLike

P = ParamSpec("P")
R = TypeVar("R")

PRODUCTS = (
    "attention", "bilinear", "conv", "conv_in_x", "einsum", "inner", "linear", "matmul", "matvec", "tensordot",
    "vecdot", "vecmat",
)  # fmt: skip
"""Sums of products, and what is made of them."""
ELEMENTWISE = (
    "acos", "asin", "cosh", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "logaddexp", "power",
    "reciprocal", "sinh", "softplus", "square", "tan",
)  # fmt: skip
"""Functions of each number that leave the range of half precision, or lose its digits."""
REDUCTIONS = (
    "average", "cdist", "cumprod", "cumsum", "cumulative_prod", "cumulative_sum", "logcumsumexp", "logsumexp", "mean",
    "nanmean", "nansum", "norm", "prod", "std", "sum", "trace", "var", "vector_norm",
)  # fmt: skip
"""Sums and products of many numbers."""
ROWS = (
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "log_softmax", "normalize",
    "normalized", "rms_norm", "softmax", "standardize",
)  # fmt: skip
"""Softmax and normalizations."""
LOSSES = (
    "bernoulli_nll", "binary_cross_entropy", "binary_cross_entropy_with_logits", "contrastive", "cosine_embedding_loss",
    "cosine_similarity", "cross_entropy", "gaussian_kl_divergence", "gaussian_nll_loss", "hinge",
    "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "pairwise_distance", "poisson_nll_loss", "smooth_l1_loss",
    "soft_margin_loss", "triplet_margin_loss",
)  # fmt: skip
"""Losses, and the distances that they are made of."""

HALF = frozenset(PRODUCTS)
FLOAT32 = frozenset((*ELEMENTWISE, *REDUCTIONS, *ROWS, *LOSSES))
NAMED = HALF | FLOAT32
HALVES = (dtypes.bfloat16, dtypes.float16)
NARROW = (*HALVES, dtypes.float32)
"""The dtypes that an autocast casts; others (float64, complex numbers, integers) stay as they are."""


def wanted(op: str, half: DType, have: Iterable[DType]) -> DType | None:
    """The dtype for the narrow operands of ``op`` under an autocast to ``half``; None: they stay as they are.

    Beside float64 or complex numbers a product is not narrowed: it promotes to these, and would lose digits before.
    """
    if op in FLOAT32:
        return dtypes.float32
    if op not in HALF or any(dtypes.is_inexact(d) and d not in NARROW for d in have):
        return None
    return half


def set_float32_matmul_precision(precision: str) -> None:
    """Say how float32 matrix products, attention and convolutions are computed from now on, in every thread.

    ``"highest"``, the default: in float32.  ``"high"``: their operands are rounded to 10 bits of fraction (TF32), for
    which GPUs have tensor cores; sums are in float32.  A CPU rounds them to nearest, to show what it does to results,
    and is slower.  ``matmul``, attention, convolutions and what is made of them follow it, factorizations do not.  A
    derivative has the precision of what it is of, and so has a rerun.  (PyTorch's function; its ``"medium"`` is
    ``tg.autocast("bfloat16")``.  With ``CUPY_TF32=1`` in the environment it begins with ``"high"``.)

    Raises DomainError for another word.
    """
    if precision not in state.PRECISIONS:
        raise DomainError(
            f'set_float32_matmul_precision: wanted "highest" or "high", got {precision!r}; for products in bfloat16 '
            "use tg.autocast"
        )
    state.choose_precision(precision)


def get_float32_matmul_precision() -> str:
    """What :func:`set_float32_matmul_precision` has set: ``"highest"`` or ``"high"``."""
    return state.chosen_precision()


class autocast:
    """Products in half precision and everything delicate in float32, inside a ``with`` block or a decorated function.

    dtype: ``"bfloat16"`` or ``"float16"`` (for which see ``tg.optim.LossScaler``).  Operands of products
    (``matmul``, ``einsum``, convolutions, ``Dense``, attention's) are cast to it, sums are in float32 and rounded once;
    norms, softmax, losses, reductions and functions such as ``exp`` take and give float32; all else computes in the
    dtype that its operands promote to.  float64 and complex numbers are left alone.  Variables stay as they are: each
    use casts one, and its gradient comes back in its own dtype.

    It holds for this thread, in blocks inside as well; ``enabled=False`` ends it for a block.  Gradients have the
    dtypes of the forward pass, wherever they are asked for; a checkpointed function, a ``custom_gradient``'s gradient
    function and a program of ``tg.function`` (one for each autocast) run as at the call.  (PyTorch's
    ``torch.autocast``.)

    Raises DTypeError for another dtype.
    """

    def __init__(self, dtype: DTypeLike = "bfloat16", enabled: bool = True) -> None:
        half = dtypes.asdtype(dtype)
        if half not in HALVES:
            raise DTypeError(f"autocast: wanted 'bfloat16' or 'float16', got {half}; float32 is without an autocast")
        self.dtype = half
        self.enabled = bool(enabled)

    @property
    def _cast(self) -> DType | None:
        return self.dtype if self.enabled else None

    def __enter__(self) -> autocast:
        state.cast_from_now(self._cast)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        state.cast_no_more()

    def __call__(self, f: Callable[P, R]) -> Callable[P, R]:
        """``f``, each call of which runs under the autocast."""

        @functools.wraps(f)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            outer = state.thread.autocasts
            return during(functools.partial(f, *args, **kwargs), autocasts=(*outer, self._cast))

        return wrapped

    def __repr__(self) -> str:
        return f"autocast({str(self.dtype)!r}{'' if self.enabled else ', enabled=False'})"
