"""Differences from PyTorch that are meant, each with its reason: (entries of ``op_db``, kinds of difference, reason).

Patterns are regular expressions for the whole name; the third one is searched for in what the comparison says.
"""

from __future__ import annotations

from typing import NamedTuple


class Convention(NamedTuple):
    """Where a difference is meant, and why."""

    op: str
    kind: str
    says: str
    reason: str


CONVENTIONS = [
    Convention(
        ".*", "error", "out of range for an array of 0 dimensions", "An array of no dimensions has no axis (NumPy)."
    ),
    Convention(
        r".*/with_dtype|double|float",
        "error",
        "drops the imaginary part",
        "Complex numbers never become real by a cast; PyTorch warns and drops the imaginary part.",
    ),
    Convention(r"n?a?n?median", "value", "", "Of an even number of elements the mean of both in the middle (NumPy)."),
    Convention("addr", "value", "nan", "beta=0 multiplies: it does not hide NaN as BLAS does."),
    Convention(
        r"(linalg\.)?cholesky|linalg\.eig(h|valsh)|linalg\.pinv/hermitian",
        "gradient",
        "",
        "Of Hermitian matrices the gradient is Hermitian (cholesky), or of the triangle that is read (eigh, pinv).",
    ),
    Convention("cholesky_solve", "gradient", "", "The triangle that is not read has no gradient."),
    Convention("cov", "gradient", "", "PyTorch computes with weights of float32 in float32."),
    Convention(
        "ldexp", "error", "exponents must be integers|not defined for complex", "Exponents are integers (NumPy)."
    ),
    Convention(
        r"logaddexp|logcumsumexp|nn\.functional\.(softsign|rms_norm)",
        "error",
        "not defined for complex numbers",
        "Refused: no library but PyTorch defines it.",
    ),
    Convention(
        "nn.functional.linear_cross_entropy.*",
        "error",
        "wanted a weight|'options'",
        "Ours takes rows of features and has no options of chunks: it never makes the scores.",
    ),
    Convention(
        "nn.functional.pad/replicate_negative", "error", "is empty", "An empty axis has no edge to repeat (NumPy)."
    ),
    Convention(
        r"nn\.functional\.(multi_margin_loss|multilabel_margin_loss|batch_norm|feature_alpha_dropout/.*)",
        "error",
        "wanted input",
        "The input names its classes or channels.",
    ),
    Convention(
        "nn.functional.avg_pool2d", "error", r"got \([12]?,?\)", "One number or a pair, no tuple of one or of none."
    ),
    Convention(
        r"nn\.functional\.max_unpool.d",
        "gradient",
        "",
        "Where two inputs have one index the last one wins, and it alone has a gradient; PyTorch gives one to both.",
    ),
    Convention(
        r"nn\.functional\.ctc_loss",
        "gradient",
        "",
        "The derivative in the scores that are given; PyTorch's supposes that they are normalized.",
    ),
    Convention(
        r"nn\.functional\.triplet_margin_with_distance_loss",
        "error",
        "must be Tensor, not Tensor",
        "The samples hold a distance of PyTorch's tensors.",
    ),
    Convention("nextafter", "gradient error", "has no gradient", "A step function of the second operand: no gradient."),
    Convention("einsum", "error", "must name labels", "An ellipsis of the operands stands in the result (NumPy)."),
    Convention("gather", "error", "2 indices for", "A trick of PyTorch's: an empty index of other dimensions."),
    Convention(r"histogram(dd)?", "error", "'weight'", "NumPy's name is weights, and results differ in form."),
    Convention("searchsorted", "error", "need one dimension", "One sorted vector (NumPy), not one for each row."),
    Convention("cat", "error", "out of range", "No axis is passed over for an empty vector of one dimension."),
    Convention(
        "tensordot", "error", "differ in length", "Contracted axes are of one length: 1 is not broadcast (NumPy)."
    ),
    Convention("nonzero", "error", "no dimensions", "nonzero of a number is refused (NumPy 2)."),
    Convention(r"linalg\.lstsq.*", "error", "needs a matrix", "One system (NumPy); vmap maps it over several."),
    Convention(r"linalg\.norm.*", "error", "is empty", "There is no largest of nothing (NumPy); PyTorch says 0."),
    Convention(
        r"linalg\.norm/subgradients_at_zero",
        "second gradient",
        "nan",
        "Derivatives of norms at 0 are 0; PyTorch's second ones NaN.",
    ),
    Convention(r"linalg\.vander", "error", "needs a vector", "Of one vector (NumPy)."),
    Convention(r"linalg\.lu_solve", "error", "fit a right side|broadcast", "Systems from the left only (SciPy)."),
    Convention(
        r"linalg\.solve",
        "error|value",
        r"do not fit|shape \(0, 0, 0\)",
        "A right side of one dimension is a vector, any other a stack of matrices (NumPy 2).",
    ),
    Convention(
        r"linalg\.pinv/singular",
        "error",
        "ambiguous",
        "The samples hold the factors of a matrix, not its pseudo-inverse's operands.",
    ),
    Convention(
        r"linalg\.svd",
        "forward error",
        "full_matrices=True",
        "The additional vectors have no derivative, so their tangents are refused.",
    ),
    Convention(
        r"special\.bessel_[jy][01]",
        "value",
        "",
        "SciPy's values, to the last digits; PyTorch's are less exact near zeros.",
    ),
    Convention("gradient", "error", "NoneType", "A spacing of None is PyTorch's for 1."),
]
