"""What evaluating lazy tensors will do: the region, the kernel's text and the bytes it moves.  Nothing is evaluated."""

from __future__ import annotations

from typing import TextIO

from tapegrad.core.buffer import Buffer
from tapegrad.core.primitive import Reduction
from tapegrad.device import cuda_types
from tapegrad.engine import region
from tapegrad.engine.lowering import of_region
from tapegrad.tensor import TensorLike, convert


def explain(*tensors: TensorLike, device: str | None = None, file: TextIO | None = None) -> None:
    """Print how ``tensors`` would be evaluated together: kernels, their nodes, bytes read and written, their text.

    ``device="cuda"`` shows the CUDA C++ also where there is no GPU (and none is needed); the default is the tensors'
    own.  What has a value already needs no kernel: a variable, an array, a number, a tensor that was evaluated.  If
    there are several kernels, each is shown as if it ran first.  Raises NotATensorError.
    """
    pending = {}
    for t in map(convert, tensors):
        b = region.viewed(t._buffer)
        if b.array is None and not b.state:
            pending[id(b)] = b
        elif b.array is None:
            print(f"{t._buffer.node.aval!r}: was evicted ({t.nbytes} bytes); reading it recomputes it", file=file)
        else:
            print(f"{t._buffer.node.aval!r}: has its value already ({t.nbytes} bytes); no kernel", file=file)
    for number, group in enumerate(region.kernels(list(pending.values())), 1):
        print(f"kernel {number}: {_explained(group, device)}", file=file)


def _explained(group: list[Buffer], device: str | None) -> str:
    needed, targets, shape, task = of_region(group, device and device.partition(":")[0])
    leaves = needed.arrays
    read, written = sum(map(cuda_types.extent, leaves)), sum(b.node.aval.nbytes for b in targets)
    lines = [
        f"{len(needed.order)} nodes over {shape}, {len(leaves)} inputs, {len(targets)} outputs; "
        f"reads {read} bytes, writes {written}"
    ]
    lines += [f"  x{i}: {b.node.aval!r}" for i, b in enumerate(needed.leaves)]
    names = {id(b): f"x{i}" for i, b in enumerate(needed.leaves)}
    for number, b in enumerate(needed.order):
        names[id(b)] = f"v{number}"
        operands = ", ".join(names[id(k)] for k in b.inputs)
        axes = f" over axes {b.node.params['axis']}" if isinstance(b.node.prim, Reduction) else ""
        asked = any(b is t for t in group)
        out = "  <- output" if asked else "  <- output, kept on the way" if any(b is t for t in targets) else ""
        lines.append(f"  v{number}: {b.node.aval!r} = {b.node.prim.name}({operands}){axes}{out}")
    return "\n".join([*lines, *(f"    {line}" for line in task.text().splitlines())])
