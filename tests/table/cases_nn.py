"""Neural networks' functions: PyTorch's calls stand in ``nn_cases``; here are those of JAX and Chainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nn_cases
import numpy as np
from table.coverage_case import Case, case, uniform

import tapegrad as tg
from tapegrad.nn import functional as F


def _like_torch(found: nn_cases.Case) -> Case:
    operands = found.operands()
    return case(f"nn.functional.{found.name}", *operands, call=lambda *xs: found.call(F, xs))


def _first_calls() -> dict[str, Case]:
    """For each function the first of its calls that has something to differentiate."""
    found: dict[str, Case] = {}
    for call in nn_cases.CASES:
        if call.name not in found and call.operands():
            found[call.name] = _like_torch(call)
    return found


X, P = uniform(3, 4, low=-1.5, high=1.5), uniform(3, 4, seed=1)
IMAGE = uniform(2, 4, 6, 6, seed=2)
W, B = uniform(5, 4, seed=3), uniform(5, seed=4)
LABELS, SIGNS = np.array([1, 0, 2]), np.array([1, -1, 1])
SCALE, SHIFT = uniform(4, low=0.8, high=1.2, seed=5), uniform(4, seed=6)
LOGP = np.log(uniform(6, 2, 4, seed=7) / 4)
COST, STEPS = uniform(3, 3, seed=8), [uniform(2, 3, seed=s) for s in (9, 10)]
BOXES, OF_IMAGE = np.array([[0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 5.0, 5.0]]), np.array([0, 1])
ROIS = np.array([[0.0, 0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 1.0, 5.0, 5.0]])
ROWS = [uniform(3, 2, seed=s) for s in (11, 12)]


def seeded(name: str) -> Callable:
    """A function that draws: the same numbers at every call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tg.random.seed(3)
        return getattr(F, name)(*args, **kwargs)

    return call


def recurrent(name: str, gates: int, directions: int, cell: bool = False) -> Case:
    """Chainer's stacked networks of one layer: input 2, hidden 3."""
    shapes = [(3, 2)] * (gates // 2) + [(3, 3)] * (gates // 2)
    ws = [[uniform(*s, seed=20 + i) for i, s in enumerate(shapes)] for _ in range(directions)]
    bs = [[uniform(3, seed=40 + i) for i in range(gates)] for _ in range(directions)]
    states = [uniform(directions, 3, 3, seed=60 + i) for i in range(2 if cell else 1)]
    return case(f"nn.functional.{name}", 1, 0.0, *states, ws, bs, ROWS)


def _of(name: str, *args: Any, **options: Any) -> Case:
    return case(f"nn.functional.{name}", *args, **options)


def _fixed(name: str, x: Any, *args: Any, **options: Any) -> Case:
    """Differentiated in ``x`` alone."""
    return case(f"nn.functional.{name}", x, call=lambda x: getattr(F, name)(x, *args, **options))


_CALLS = _first_calls()
CASES: dict[str, Case] = {
    f"nn.{name}": call
    for name, call in _CALLS.items()
    if name
    not in ("logsigmoid", "sigmoid", "tanh", "softmin", "lp_pool1d", "lp_pool2d", "lp_pool3d", "affine_grid", "fold")
}
CASES |= {
    "nn.log_sigmoid": _CALLS["logsigmoid"],
    "nn.cross_entropy": _of("cross_entropy", X, LABELS, label_smoothing=0.1),
    "nn.binary_cross_entropy_with_logits": _of("binary_cross_entropy_with_logits", X, P),
    "nn.pdist": _of("pdist", X),
    "nn.pairwise_distance": _of("pairwise_distance", X, P),
    "nn.ctc_loss": _of("ctc_loss", LOGP, np.array([[1, 2], [3, 3]]), np.array([6, 6]), np.array([2, 2])),
    **{f"nn.{name}": _of(name, X, call=seeded(name)) for name in ("dropout", "gumbel_softmax")},
    "nn.alpha_dropout": _of("alpha_dropout", X, training=True, call=seeded("alpha_dropout")),
    "nn.feature_alpha_dropout": _of("feature_alpha_dropout", X, training=True, call=seeded("feature_alpha_dropout")),
    "nn.dropout2d": _of("dropout2d", IMAGE, call=seeded("dropout2d")),
    "nn.dropout3d": _of("dropout3d", IMAGE[..., None], call=seeded("dropout3d")),
    "nn.zoneout": _of("zoneout", X, P, call=seeded("zoneout")),
    "nn.simplified_dropconnect": _of("simplified_dropconnect", X, W, B, call=seeded("simplified_dropconnect")),
    "nn.argmax_crf1d": _of("argmax_crf1d", COST, STEPS, call=lambda c, xs: F.argmax_crf1d(c, xs)[0]),
    "nn.crf1d": _of("crf1d", COST, STEPS, [np.array([0, 2]), np.array([1, 1])]),
    "nn.batch_renormalization": _of(
        "batch_renormalization", X, SCALE, SHIFT, rmax=1.0, dmax=0.0, note="its r and d are constants, as in the paper"
    ),
    "nn.bernoulli_nll": _of("bernoulli_nll", P, X),
    "nn.black_out": _of("black_out", X, LABELS, W, np.array([[3, 4], [4, 3], [3, 4]])),
    "nn.contrastive": _of("contrastive", X, P, np.array([1, 0, 1])),
    "nn.crelu": _of("crelu", X),
    "nn.cross_covariance": _of("cross_covariance", X, P),
    "nn.decorrelated_batch_normalization": _of("decorrelated_batch_normalization", uniform(6, 4), groups=2, tol=1e-3),
    "nn.fixed_decorrelated_batch_normalization": _of(
        "fixed_decorrelated_batch_normalization", X, uniform(2, 2), uniform(2, 2, 2), groups=2
    ),
    "nn.decov": _of("decov", X),
    "nn.deformable_convolution_2d_sampler": _of(
        "deformable_convolution_2d_sampler", IMAGE, uniform(2, 18, 4, 4, seed=13), uniform(3, 4, 3, 3, seed=14)
    ),
    "nn.depthwise_convolution_2d": _of("depthwise_convolution_2d", IMAGE, uniform(2, 4, 3, 3, seed=15)),
    "nn.local_convolution_2d": _of("local_convolution_2d", IMAGE, uniform(3, 4, 4, 4, 3, 3, seed=16)),
    "nn.discriminative_margin_based_clustering_loss": _fixed(
        "discriminative_margin_based_clustering_loss", uniform(1, 3, 3, 4, seed=17),
        np.array([[[0, 0, 1, 1], [0, 1, 1, 2], [2, 2, 2, 1]]]), 0.1, 1.5, 3,
    ),
    "nn.fixed_batch_normalization": _of("fixed_batch_normalization", X, SCALE, SHIFT, P[0], SCALE + 1),
    "nn.fixed_batch_renormalization": _of("fixed_batch_renormalization", X, SCALE, SHIFT, P[0], SCALE + 1),
    "nn.gaussian_kl_divergence": _of("gaussian_kl_divergence", X, P),
    "nn.hinge": _of("hinge", X, LABELS, norm="L2"),
    "nn.log1mexp": _of("log1mexp", P),
    "nn.logmeanexp": _of("logmeanexp", X, axis=1),
    "nn.lstm": _of("lstm", uniform(3, 2), uniform(3, 8)),
    "nn.slstm": _of("slstm", uniform(3, 2), uniform(3, 2, seed=1), uniform(3, 8), uniform(3, 8, seed=2)),
    "nn.tree_lstm": _of("tree_lstm", uniform(3, 2), uniform(3, 2, seed=1), uniform(3, 10)),
    "nn.maxout": _of("maxout", X, 2),
    "nn.n_step_rnn": recurrent("n_step_rnn", 2, 1),
    "nn.n_step_birnn": recurrent("n_step_birnn", 2, 2),
    "nn.n_step_gru": recurrent("n_step_gru", 6, 1),
    "nn.n_step_bigru": recurrent("n_step_bigru", 6, 2),
    "nn.n_step_lstm": recurrent("n_step_lstm", 8, 1, cell=True),
    "nn.n_step_bilstm": recurrent("n_step_bilstm", 8, 2, cell=True),
    "nn.negative_sampling": _of(
        "negative_sampling", X, LABELS, W, lambda shape: np.resize([3, 4, 0], shape), 2
    ),
    "nn.one_hot": case("one_hot", B, call=lambda b: tg.one_hot(LABELS, 5) @ b, note="no gradient: indices"),
    "nn.roi_average_align_2d": _fixed("roi_average_align_2d", IMAGE, BOXES, OF_IMAGE, 2, 1.0),
    "nn.roi_average_pooling_2d": _fixed("roi_average_pooling_2d", IMAGE, BOXES, OF_IMAGE, 2, 1.0),
    "nn.roi_max_align_2d": _fixed("roi_max_align_2d", IMAGE, BOXES, OF_IMAGE, 2, 1.0),
    "nn.roi_max_pooling_2d": _fixed("roi_max_pooling_2d", IMAGE, BOXES, OF_IMAGE, 2, 1.0),
    "nn.roi_pooling_2d": _fixed("roi_pooling_2d", IMAGE, ROIS, 2, 2, 1.0),
    "nn.shift": _of("shift", uniform(2, 9, 4, 4)),
    "nn.sparse_plus": _of("sparse_plus", X),
    "nn.sparse_sigmoid": _of("sparse_sigmoid", X),
    "nn.spatial_pyramid_pooling_2d": _of("spatial_pyramid_pooling_2d", IMAGE, 2),
    "nn.squared_difference": _of("squared_difference", X, P),
    "nn.squareplus": _of("squareplus", X),
    "nn.standardize": _of("standardize", X),
    "nn.unpooling_1d": _of("unpooling_1d", uniform(2, 3, 4), 2),
    "nn.unpooling_3d": _of("unpooling_3d", uniform(1, 2, 2, 2, 3), 2),
    "nn.unpooling_nd": _of("unpooling_nd", uniform(1, 2, 2, 3), (2, 2)),
}  # fmt: skip
LEFT_OUT: dict[str, str] = {}
