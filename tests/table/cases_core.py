"""Arithmetic, elementary functions, shapes, reductions: the first tier."""

from __future__ import annotations

import numpy as np
from table.coverage_case import Case, case, uniform

import tapegrad as tg

A, B, M = uniform(3, 4), uniform(3, 4, seed=1), uniform(4, 2, seed=2)
OVER = uniform(3, 4, low=1.2, high=3.0)
BOTH = uniform(3, 4, low=-2.0, high=2.0, seed=3)
PLACES = np.array([[0, 2], [1, 1]])

_UNARY = (
    "abs acos asin atan atanh cos cosh exp expm1 log log10 log1p log2 negative sin sinh sqrt square tan tanh asinh "
    "conj real reciprocal positive ceil floor round sign trunc"
).split()
_BINARY = (
    "add atan2 divide maximum minimum multiply pow subtract hypot logaddexp remainder copysign floor_divide".split()
)

CASES: dict[str, Case] = {
    **{op: case(op, A) for op in _UNARY},
    **{op: case(op, A, B[:1]) for op in _BINARY},
    "acosh": case("acosh", OVER),
    "imag": case("imag", A + 1j * B),
    "astype": case("astype", A, call=lambda x: tg.real(tg.astype(x, tg.complex128)), note="checked there and back"),
    "broadcast_to": case("broadcast_to", A[:1], (3, 4)),
    "clip": case("clip", BOTH, -1.0, 1.0),
    "concat": case("concat", [A, B], axis=1),
    "cumulative_sum": case("cumulative_sum", A, axis=1),
    "cumulative_prod": case("cumulative_prod", A, axis=1),
    "einsum": case("einsum", "ij,jk->ki", A, M),
    "expand_dims": case("expand_dims", A, axis=1),
    "getitem": case("asarray", A, call=lambda x: x[1:, PLACES[0]], note="`x[...]`"),
    "linalg.outer": case("linalg.outer", A[0], B[1]),
    "matmul": case("matmul", A, M),
    "max": case("max", A, axis=1),
    "min": case("min", A, axis=1),
    "moveaxis": case("moveaxis", A, 0, 1),
    "pad": case("pad", A, ((1, 0), (2, 1)), mode="reflect"),
    "permute_dims": case("permute_dims", A, (1, 0)),
    "prod": case("prod", A, axis=1),
    "repeat": case("repeat", A, 2, axis=1),
    "reshape": case("reshape", A, (2, 6)),
    "squeeze": case("squeeze", A[:1], axis=0),
    "stack": case("stack", [A, B], axis=1),
    "sum": case("sum", A, axis=0, keepdims=True),
    "tensordot": case("tensordot", A, M, axes=1),
    "tile": case("tile", A, (2, 3)),
    "where": case("where", A > 0.5, A, B),
    "asarray": case("asarray", A),
    "broadcast_arrays": case("broadcast_arrays", A[:1], B),
    "diff": case("diff", A, n=2),
    "flip": case("flip", A, axis=1),
    "mean": case("mean", A, axis=1),
    "roll": case("roll", A, 2, axis=1),
    "sort": case("sort", A, axis=1),
    "std": case("std", A, axis=1),
    "take": case("take", A, PLACES, axis=1),
    "take_along_axis": case("take_along_axis", A, np.array([[0, 1], [2, 2], [3, 0]]), axis=1),
    "tril": case("tril", A),
    "triu": case("triu", A, k=1),
    "unstack": case("unstack", A, axis=1),
    "var": case("var", A, axis=1, correction=1),
    "matrix_transpose": case("matrix_transpose", A),
    "meshgrid": case("meshgrid", A[0], B[1]),
    "vecdot": case("vecdot", A, B),
}
LEFT_OUT: dict[str, str] = {}
