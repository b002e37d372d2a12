"""Operations: one declaration per primitive, in the file of its kind; composites are plain functions beside them.

Names are the array API standard's; NumPy's other names for them follow at the end.
"""

from tapegrad.ops import dtype_functions, floating, numpy_functions, sets, sharing
from tapegrad.ops.activation import (
    elu,
    erf,
    erfc,
    gelu,
    leaky_relu,
    log_sigmoid,
    relu,
    sigmoid,
    silu,
    softplus,
    softsign,
)
from tapegrad.ops.arithmetic import (
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
    power,
    reciprocal,
    remainder,
    rint,
    round,
    sign,
    sqrt,
    square,
    subtract,
)
from tapegrad.ops.arranging import (
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
from tapegrad.ops.comparison import (
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
from tapegrad.ops.complex import conj, imag, real
from tapegrad.ops.creation import (
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
from tapegrad.ops.cross_entropy import cross_entropy
from tapegrad.ops.cumulative import cumprod, cumsum, cumulative_prod, cumulative_sum, diff
from tapegrad.ops.dtype_functions import *  # noqa: F403
from tapegrad.ops.einsum import einsum
from tapegrad.ops.exponential import exp, exp2, expm1, log, log1p, log2, log10, logaddexp
from tapegrad.ops.floating import *  # noqa: F403
from tapegrad.ops.indexing import nonzero, one_hot, take, take_along_axis
from tapegrad.ops.joining import (
    array_split,
    concat,
    flip,
    repeat,
    roll,
    split,
    stack,
    tile,
    unstack,
)
from tapegrad.ops.methods import bind_methods
from tapegrad.ops.naming import name
from tapegrad.ops.normalization import layer_norm
from tapegrad.ops.numpy_functions import *  # noqa: F403
from tapegrad.ops.operators import bind_operators
from tapegrad.ops.padding import pad as pad  # so that the checker of types sees it
from tapegrad.ops.products import dot, inner, matmul, matvec, outer, tensordot, vdot, vecdot, vecmat
from tapegrad.ops.reductions import (
    all,
    any,
    count_nonzero,
    logsumexp,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from tapegrad.ops.selection import where
from tapegrad.ops.sets import *  # noqa: F403
from tapegrad.ops.shape import (
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
from tapegrad.ops.sharing import *  # noqa: F403
from tapegrad.ops.softmax import log_softmax, softmax
from tapegrad.ops.sorting import (
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
from tapegrad.ops.trigonometric import (
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
    tanh,
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
__all__ += floating.__all__
__all__ += sets.__all__
__all__ += sharing.__all__
__all__ += numpy_functions.__all__
__all__.sort()

bind_operators()
bind_methods()
