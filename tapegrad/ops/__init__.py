"""Operations: one declaration per primitive, in the file of its kind; composites are plain functions beside them.

Names are the array API standard's; NumPy's other names for them follow at the end.
"""

from tapegrad.ops.create.creation import (
    arange,
    asarray,
    astype,
    constant,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from tapegrad.ops.elementwise.activation import (
    elu,
    erf,
    erfc,
    gelu,
    leaky_relu,
    log_sigmoid,
    relu,
    silu,
    softplus,
    softsign,
)
from tapegrad.ops.elementwise.arithmetic import (
    abs,
    add,
    clip,
    divide,
    floor_divide,
    maximum,
    minimum,
    multiply,
    negative,
    positive,
    reciprocal,
    remainder,
    rint,
    round,
    sign,
    sqrt,
    square,
    subtract,
)
from tapegrad.ops.elementwise.comparison import (
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    ceil,
    equal,
    floor,
    greater,
    greater_equal,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
    signbit,
    trunc,
)
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.exponential import exp, exp2, expm1, log, log1p, log2, log10, logaddexp, power
from tapegrad.ops.elementwise.selection import nonzero, where
from tapegrad.ops.elementwise.sigmoid import sigmoid, tanh
from tapegrad.ops.elementwise.trigonometric import (
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    cos,
    cosh,
    hypot,
    sin,
    sinh,
    tan,
)
from tapegrad.ops.index.indexing import one_hot, take, take_along_axis
from tapegrad.ops.index.sort import (
    argmax,
    argmin,
    argsort,
    searchsorted,
    sort,
    top_k,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from tapegrad.ops.interop import dtype_functions, numpy_functions, sharing
from tapegrad.ops.interop.dtype_functions import *  # noqa: F403
from tapegrad.ops.interop.names import name
from tapegrad.ops.interop.numpy_functions import *  # noqa: F403
from tapegrad.ops.interop.operators import bind_operators
from tapegrad.ops.interop.sharing import *  # noqa: F403
from tapegrad.ops.products.einsum import einsum
from tapegrad.ops.products.products import dot, inner, matmul, matvec, outer, tensordot, vdot, vecdot, vecmat
from tapegrad.ops.reduce.cumulative import cumprod, cumsum, cumulative_prod, cumulative_sum, diff
from tapegrad.ops.reduce.reductions import all, any, count_nonzero, logsumexp, max, mean, min, prod, std, sum, var
from tapegrad.ops.rows.cross_entropy import cross_entropy
from tapegrad.ops.rows.normalization import layer_norm
from tapegrad.ops.rows.softmax import log_softmax, softmax
from tapegrad.ops.shape.arrange import (
    atleast_1d,
    atleast_2d,
    atleast_3d,
    broadcast_arrays,
    broadcast_shapes,
    column_stack,
    dsplit,
    dstack,
    fliplr,
    flipud,
    hsplit,
    hstack,
    meshgrid,
    ravel,
    rot90,
    tril,
    triu,
    vsplit,
    vstack,
)
from tapegrad.ops.shape.join import array_split, concat, flip, repeat, roll, split, stack, tile, unstack
from tapegrad.ops.shape.padding import pad as pad  # so that a type checker sees it
from tapegrad.ops.shape.shape import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    moveaxis,
    permute_dims,
    reshape,
    squeeze,
    swapaxes,
    transpose,
)

absolute = abs
amax, amin = max, min
arccos, arccosh, arcsin, arcsinh, arctan, arctan2, arctanh = acos, acosh, asin, asinh, atan, atan2, atanh
bitwise_not = invert = bitwise_invert
concatenate = concat
conjugate = conj
left_shift, right_shift = bitwise_left_shift, bitwise_right_shift
mod = remainder
pow = power
true_divide = divide

__all__ = [
    "abs", "absolute", "acos", "acosh", "add", "all", "amax", "amin", "any", "arange", "arccos", "arccosh", "arcsin",
    "arcsinh", "arctan", "arctan2", "arctanh", "argmax", "argmin", "argsort", "array_split", "asarray", "asin",
    "asinh", "astype", "atan", "atan2", "atanh", "atleast_1d", "atleast_2d", "atleast_3d", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "broadcast_arrays", "broadcast_shapes", "broadcast_to", "ceil", "clip", "column_stack", "concat", "concatenate",
    "conj", "conjugate", "constant", "cos", "cosh", "count_nonzero", "cross_entropy", "cumprod", "cumsum",
    "cumulative_prod", "cumulative_sum", "diff", "divide", "dot", "dsplit", "dstack", "einsum", "elu", "empty",
    "empty_like",
    "equal", "erf", "erfc", "exp", "exp2", "expand_dims", "expm1", "eye", "flip", "fliplr", "flipud", "floor",
    "floor_divide", "full", "full_like", "gelu", "greater", "greater_equal", "hsplit", "hstack", "hypot", "imag",
    "inner", "invert", "isfinite", "isinf", "isnan", "layer_norm", "leaky_relu", "left_shift", "less", "less_equal",
    "log", "log10", "log1p", "log2", "log_sigmoid", "log_softmax", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "matmul", "matrix_transpose", "matvec", "max", "maximum",
    "mean", "meshgrid", "min", "minimum", "mod", "moveaxis", "multiply", "name", "negative", "nonzero", "not_equal",
    "one_hot", "ones",
    "ones_like", "outer", "permute_dims", "positive", "pow", "power", "prod", "ravel", "real", "reciprocal",
    "relu", "remainder", "repeat", "reshape", "right_shift", "rint", "roll", "rot90", "round", "searchsorted",
    "sigmoid", "sign", "signbit", "silu", "sin", "sinh", "softmax", "softplus", "softsign", "sort", "split", "sqrt",
    "square", "squeeze", "stack", "std", "subtract", "sum", "swapaxes", "take", "take_along_axis", "tan", "tanh",
    "tensordot", "tile", "top_k", "transpose", "tril", "triu", "true_divide", "trunc", "unique_all", "unique_counts",
    "unique_inverse", "unique_values", "unstack", "var", "vdot", "vecdot", "vecmat", "vsplit", "vstack", "where",
    "zeros", "zeros_like",
]  # fmt: skip
__all__ += dtype_functions.__all__
__all__ += sharing.__all__
__all__ += numpy_functions.__all__
__all__.sort()

bind_operators()
