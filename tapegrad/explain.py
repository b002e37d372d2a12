"""What evaluating lazy tensors will do: the region, the kernel's text and the bytes it moves.  Nothing is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TextIO

from tapegrad.buffer import Buffer
from tapegrad.device import cxx
from tapegrad.fusion import cuda_emit, cuda_launch, emit, launch, region
from tapegrad.tensor import Tensor


def explain(*tensors: Tensor, device: str | None = None, file: TextIO | None = None) -> None:
    """Print how ``tensors`` would be evaluated together: kernels, their nodes, bytes read and written, their text.

    ``device="cuda"`` shows the CUDA C++ also where there is no GPU (and none is needed); the default is the tensors'
    own.  Tensors that have a value already need no kernel.
    """
    pending = []
    for t in tensors:
        if t._buffer.array is None:
            pending.append(t._buffer)
        else:
            print(f"{t._buffer.node.aval!r}: has its value already ({t.nbytes} bytes); no kernel", file=file)
    for number, group in enumerate(region.kernels(pending), 1):
        print(f"kernel {number}: {_explained(group, device)}", file=file)


def _explained(targets: list[Buffer], device: str | None) -> str:
    work = region.collect(targets)
    loops = [region.loop_of(b) for b in targets]
    shape = loops[0][0]
    axes = next((a for _, a in loops if a is not None), None)
    kind = device.split(":")[0] if device else targets[0].node.aval.device.kind
    read = sum(cxx.extent(b.array) for b in work.leaves)
    written = sum(b.node.aval.nbytes for b in targets)
    lines = [
        f"{len(work.order)} nodes over {shape}, {len(work.leaves)} inputs, {len(targets)} outputs; "
        f"reads {read} bytes, writes {written}"
    ]
    lines += [f"  x{i}: {b.node.aval!r}" for i, b in enumerate(work.leaves)]
    names = {id(b): f"x{i}" for i, b in enumerate(work.leaves)}
    for number, b in enumerate(work.order):
        names[id(b)] = f"v{number}"
        operands = ", ".join(names[id(k)] for k in b.keeps)
        where = f" over axes {b.node.params['axis']}" if b.node.prim.reduce else ""  # type: ignore[union-attr]
        out = "  <- output" if any(b is t for t in targets) else ""
        lines.append(f"  v{number}: {b.node.aval!r} = {b.node.prim.name}({operands}){where}{out}")  # type: ignore[union-attr]
    text = _cuda_text(work, targets, shape, axes) if kind == "cuda" else _tile_program(work, targets, shape)
    return "\n".join([*lines, *(f"    {line}" for line in text.splitlines())])


def _cuda_text(work: region.Region, targets: list[Buffer], shape: Sequence[int], axes: Any) -> str:
    stages = region.stages(work, targets)
    full = cuda_launch.planned(stages.divide(targets)[0])
    loop, kinds, form = cuda_launch.plan(work, stages, tuple(shape), axes, [b.array for b in work.leaves], full)
    return cuda_emit.text_of(work, stages, targets, kinds, loop, form)


def _tile_program(work: region.Region, targets: list[Buffer], shape: Sequence[int]) -> str:
    layouts = [launch.layout(b.array, tuple(shape)) for b in work.leaves]
    program = emit.program(work, layouts, targets, targets[0].node.aval.device.xp)
    tiles = -(-prod(shape) // launch.TILE)
    names = ", ".join(program.names)
    rows = len(program.scratch)
    return f"{tiles} tiles of at most {launch.TILE} elements, {rows} rows of scratch; ufuncs in order: {names}"
