"""NumPy's other functions, and PyTorch's beside them."""

from __future__ import annotations

import numpy as np
from table.coverage_case import Case, case, uniform

import tapegrad as tg

A, B, C = uniform(3, 4), uniform(3, 4, seed=1), uniform(3, 4, seed=2)
T = uniform(2, 3, 4)
V, W, ROW = uniform(6, seed=3), uniform(6, seed=4), uniform(4, seed=5)
BOTH = uniform(3, 4, low=-2.0, high=2.0, seed=6)
HOLES = np.where(uniform(3, 4, seed=7) > 0.7, np.nan, A)
PLACES, IDS = np.array([[0, 1], [2, 2], [3, 0]]), np.array([0, 2, 2, 1, 0, 2])
GRID = np.array([0.1, 0.3, 0.55, 0.7, 0.8, 1.0])


def finite(f):
    """``f`` of an array with holes (NaN) in fixed places, as a function of the numbers between."""
    return lambda x, **options: f(tg.where(np.isnan(HOLES), np.nan, x), **options)


_UNARY = (
    "fliplr flipud ravel atleast_1d atleast_2d atleast_3d deg2rad diag exp2 rad2deg sinc diagflat cbrt copy fabs "
    "modf rot90 ediff1d real_if_close rsqrt nan_to_num diag_embed median mode batch_l2_norm_squared cov corrcoef"
).split()
_BINARY = "fmax fmin fmod logaddexp2 float_power kron vdot ldexp polar complex divmod".split()
_NAN = "nanmean nansum nanmax nanmin nanmedian nanprod nanstd nanvar nancumprod nancumsum".split()

CASES: dict[str, Case] = {
    **{op: case(op, A) for op in _UNARY},
    **{op: case(op, A, B) for op in _BINARY if op not in ("ldexp", "kron")},
    **{op: case(op, A, axis=1, call=finite(getattr(tg, op))) for op in _NAN},
    **{op: case(op, [A, B]) for op in "hstack vstack dstack column_stack".split()},
    **{op: case(op, uniform(4, 4, 2), 2) for op in "split vsplit hsplit dsplit".split()},
    "angle": case("angle", A + 1j * B),
    "array_split": case("array_split", V, 4),
    "swapaxes": case("swapaxes", T, 0, 2),
    "dot": case("dot", A, uniform(4, 2)),
    "inner": case("inner", A, B),
    "kron": case("kron", A[:2, :2].copy(), B),
    "gradient": case("gradient", A, 0.5, axis=1),
    "rollaxis": case("rollaxis", T, 2),
    "append": case("append", A, B, axis=0),
    "average": case("average", A, axis=1, weights=None, call=lambda a, **o: tg.average(a, axis=1, weights=ROW)),
    "quantile": case("quantile", A, 0.3, axis=1),
    "nanquantile": case("nanquantile", A, q=0.3, axis=1, call=finite(tg.nanquantile)),
    "nanpercentile": case("nanpercentile", A, q=30.0, axis=1, call=finite(tg.nanpercentile)),
    "percentile": case("percentile", A, [20.0, 60.0], axis=0),
    "select": case("select", [A > 0.6, B > 0.5], [A, B], 0.5),
    "setitem": case("asarray", A, ROW, call=lambda a, v: a.at[1].set(v), note="`x.at[...].set(v)`"),
    "trapezoid": case("trapezoid", A, dx=0.5, axis=1),
    "cumulative_trapezoid": case("cumulative_trapezoid", A, ROW),
    "convolve": case("convolve", V, ROW, mode="same"),
    "correlate": case("correlate", V, ROW, mode="full"),
    "interp": case("interp", A, GRID, V),
    "polyval": case("polyval", ROW, A),
    "ptp": case("ptp", A, axis=1),
    "frexp": case("frexp", A, call=lambda x: tg.frexp(x)[0]),
    "full": case("full", ROW, call=lambda v: tg.full((3, 4), v[0])),
    "ldexp": case("ldexp", A, np.array([0, 1, -2, 3])),
    "linspace": case("linspace", A, B, 5),
    "logspace": case("logspace", A, B, 4),
    "geomspace": case("geomspace", A, B + 1, 4),
    "partition": case("partition", A, 2),
    "put": case("put", A, [1, 5, 7], V[:3]),
    "put_along_axis": case("put_along_axis", A, np.array([[0], [2], [3]]), uniform(3, 1), axis=1),
    "vander": case("vander", ROW, 3),
    "addcdiv": case("addcdiv", A, B, C, value=0.5),
    "addcmul": case("addcmul", A, B, C, value=0.5),
    "aminmax": case("aminmax", A, dim=1),
    "as_strided": case("as_strided", V, (3, 2), (1, 2)),
    "block": case("block", [[A, B], [C, A * 2]]),
    "cartesian_prod": case("cartesian_prod", ROW, V[:3]),
    "cdist": case("cdist", A, B),
    "choose": case("choose", PLACES[:, :1] % 2, [A, B]),
    "combinations": case("combinations", ROW, 2),
    "compress": case("compress", [True, False, True], A, axis=0),
    "cummax": case("cummax", A, 1),
    "cummin": case("cummin", A, 0),
    "delete": case("delete", A, 1, axis=1),
    "dist": case("dist", A, B, 3),
    "fill_diagonal": case("fill_diagonal", A, ROW[0], call=lambda a, v: tg.fill_diagonal(a, v)),
    "histogram": case("histogram", V, call=lambda w: tg.histogram(GRID, bins=4, weights=w)[0], note="in the weights"),
    "histogram2d": case(
        "histogram2d", V, call=lambda w: tg.histogram2d(GRID, GRID[::-1], bins=3, weights=w)[0], note="in the weights"
    ),
    "histogramdd": case(
        "histogramdd", V, call=lambda w: tg.histogramdd(GRID[:, None], bins=3, weights=w)[0], note="in the weights"
    ),
    "index_reduce": case("index_reduce", A, 0, np.array([0, 2, 0]), B, "prod"),
    "insert": case("insert", A, 1, ROW, axis=0),
    "kthvalue": case("kthvalue", A, 2, 1),
    "lerp": case("lerp", A, B, C),
    "linear_interpolate": case("linear_interpolate", A, B, C),
    "logcumsumexp": case("logcumsumexp", A, 1),
    "pad_sequence": case("pad_sequence", [ROW, V, W[:2]]),
    "piecewise": case("piecewise", BOTH, [BOTH < 0, BOTH >= 0], [tg.sin, tg.exp]),
    "place": case("place", A, A > 0.5, V[:2]),
    "poly": case("poly", ROW),
    "polyadd": case("polyadd", ROW, V),
    "polysub": case("polysub", ROW, V),
    "polymul": case("polymul", ROW, V),
    "polyder": case("polyder", V, 2),
    "polydiv": case("polydiv", V, ROW),
    "polyfit": case("polyfit", GRID, W, 2),
    "polyint": case("polyint", ROW, 2),
    "roots": case("roots", np.array([1.0, -6.0, 11.0, -6.0]), call=lambda p: tg.prod(tg.roots(p) + 0.5)),
    "renorm": case("renorm", A, 2, 0, 0.7),
    "resize": case("resize", A, (5, 3)),
    "std_mean": case("std_mean", A, dim=1),
    "var_mean": case("var_mean", A, dim=1),
    "sum_to": case("sum_to", T, (3, 1)),
    "topk": case("topk", A, 2),
    "transpose_sequence": case("transpose_sequence", [V, ROW, W[:2]]),
    "unfold": case("unfold", A, 1, 3),
    "unwrap": case("unwrap", BOTH * 4, axis=0),
    "scatter_add": case("scatter_add", A, 0, np.array([[0, 1, 2, 0]]), B),
    "affine_grid_generator": case("nn.functional.affine_grid", uniform(2, 2, 3), [2, 1, 3, 4]),
}
LEFT_OUT: dict[str, str] = {}
