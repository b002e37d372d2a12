"""What the package offers: its public names, which ``tapegrad/__init__.py`` takes from here at their first use."""

from tapegrad import (
    distributed,
    errors,
    fft,
    integrate,
    linalg,
    memory,
    nn,
    optim,
    random,
    signal,
    sparse,
    special,
    stats,
    testing,
    training,
    tree,
)
from tapegrad import ops as _ops  # binds operators; first, so that every name below computes
from tapegrad import spellings as _spellings
from tapegrad.autodiff import cupy_protocol as _cupy_protocol
from tapegrad.autodiff.accumulator import ForwardAccumulator
from tapegrad.autodiff.custom_gradient import custom_gradient, grad_pass_through, stop_gradient
from tapegrad.autodiff.functional import grad, hvp, jvp, linearize, value_and_grad, vjp
from tapegrad.autodiff.jacobians import hessian, jacfwd, jacobian
from tapegrad.autodiff.loops import fori_loop, scan, while_loop
from tapegrad.autodiff.own_primitive import OwnPrimitive, primitive
from tapegrad.autodiff.tape import GradientTape
from tapegrad.autodiff.vmap import vmap
from tapegrad.capture.function import function
from tapegrad.core.primitive import Primitive
from tapegrad.device import device, set_default_device
from tapegrad.device.dtypes import (
    bfloat16,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from tapegrad.device.dtypes import (
    bool_ as bool,
)
from tapegrad.device.threads import get_num_threads, set_num_threads
from tapegrad.explain import explain
from tapegrad.memory import (
    checkpoint_sequential,
    checkpointed_loop,
    measure,
    memory_budget,
    policies,
    recompute_grad,
    reversible,
)
from tapegrad.ops import *  # noqa: F403
from tapegrad.ops.create.creation import tensor_of as tensor  # a module is called tensor, too
from tapegrad.ops.elementwise.complex_parts import complex_of as complex  # in ops it would hide Python's own
from tapegrad.ops.elementwise.predicates import ndim, shape, size  # a folder of ops is called shape
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.ops.interop.info import API_VERSION as __array_api_version__  # noqa: F401
from tapegrad.ops.interop.info import namespace_info as __array_namespace_info__  # noqa: F401
from tapegrad.ops.precision import autocast, get_float32_matmul_precision, set_float32_matmul_precision
from tapegrad.polynomial import *  # noqa: F403
from tapegrad.polynomial import __all__ as _polynomial
from tapegrad.special import i0
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

e = 2.718281828459045
pi = 3.141592653589793
inf = float("inf")
nan = float("nan")
newaxis = None

_cupy_protocol.bind()

__all__ = [
    "GradientTape", "Primitive", "Tensor", "Variable", "bfloat16", "bool", "checkpoint_sequential", "checkpointed_loop",
    "complex128", "complex64", "custom_gradient", "device", "e", "errors", "explain", "float16", "float32", "float64",
    "get_num_threads", "grad", "hessian", "hvp", "inf", "int16", "int32", "int64", "int8", "jacobian", "jvp",
    "measure", "memory", "memory_budget", "nan", "newaxis", "nn", "optim", "pi", "policies", "random",
    "recompute_grad", "reversible", "set_default_device", "set_num_threads", "stop_gradient", "testing", "training",
    "tree", "uint16", "uint32", "uint64", "uint8", "value_and_grad", "vjp",
]  # fmt: skip
__all__ += [
    "ForwardAccumulator",
    "IndexedSlices",
    "OwnPrimitive",
    "autocast",
    "distributed",
    "fft",
    "fori_loop",
    "function",
    "get_float32_matmul_precision",
    "grad_pass_through",
    "integrate",
    "jacfwd",
    "linalg",
    "linearize",
    "primitive",
    "scan",
    "set_float32_matmul_precision",
    "signal",
    "sparse",
    "special",
    "stats",
    "vmap",
    "while_loop",
]
__all__ += ["complex", "i0", "ndim", "shape", "size", "tensor"]
__all__ += _ops.__all__ + _polynomial

_spellings.explain(globals(), "tapegrad")
