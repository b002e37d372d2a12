"""Moving tensors between devices; the cotangent moves back."""

from __future__ import annotations

from tapegrad.core.aval import shaped
from tapegrad.core.primitive import Primitive, Sample, linear
from tapegrad.device import CPU, Device, asdevice
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, Namespace
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, tensor
from tapegrad.tensor import Tensor, TensorLike, identity_of


def _run(xp: Namespace, x: Array, *, source: Device, device: Device) -> Array:
    if device is CPU:
        return source.numpy(x)
    return device.array(x if source.kind == device.kind else source.numpy(x))


def _dry_run(x: Array, *, source: Device, device: Device, out: Array) -> Array | HostScalar:
    return HostScalar(out, device) if source is CPU and not out.ndim else out  # a number in the form the device has


to_device_p: Primitive = linear(
    "to_device",
    impl=_run,
    infer=lambda x, *, source, device: shaped(x.shape, x.dtype, device),
    transpose=lambda ct, x, *, source, device: barrier(to_device_p, ct, source=device, device=source),
    dry=_dry_run,
    lift=same_params,
    samples=[Sample((2, 3), source=CPU, device=CPU)],
    doc="The same values on another device.",
)


def to_device(x: TensorLike, device: Device | str, *, stream: object = None) -> Tensor:
    """``x`` on ``device``: without a copy if it lies there; differentiable.

    ``stream`` is accepted for the array API standard; work is ordered on CuPy's current stream.  Raises DeviceError if
    the device is not available.
    """
    x = tensor("to_device", x)
    target = asdevice(device)
    if target is x.device:
        return identity_of(x)
    return barrier(to_device_p, x, source=x.device, device=target)
