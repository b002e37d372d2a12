"""Small kernels written in PTX by hand, for tests of the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import Global
from .run import Program, launch

_HEAD = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p_x0, .param .u64 p_x1, .param .u64 p_x2, .param .u64 p_x3, .param .u64 p_out)
{{
    .reg .pred %p<20>;
    .reg .b32 %r<60>;
    .reg .b64 %d<40>;
    .reg .b32 %tid;  .reg .b64 %out;
    .shared .align 16 .b8 memory[{shared}];
    mov.u32 %tid, %tid.x;
    setp.eq.u32 %p0, %tid, 0;
    ld.param.u64 %d0, [p_x0];  ld.param.u64 %d1, [p_x1];  ld.param.u64 %d2, [p_x2];  ld.param.u64 %d3, [p_x3];
    ld.param.u64 %out, [p_out];
    {body}
    ret;
}}
"""


def run(body: str, threads: int, *inputs: np.ndarray, out: np.ndarray, blocks: int = 1, shared: int = 4096) -> Any:
    """What ``out`` is after a body: %d0 to %d3 and %out are addresses, %tid the thread, %p0 true in the first."""
    program = Program(_HEAD.format(body=body, shared=shared))
    arrays = [np.ascontiguousarray(x) for x in (*inputs, *[np.zeros(2)] * (4 - len(inputs)), out)]
    memory = Global([(x.ctypes.data, x.nbytes) for x in arrays])
    for x in arrays:
        memory.part(x.ctypes.data, x.nbytes)[:] = x.view(np.uint8).reshape(-1)
    arguments = b"".join(x.ctypes.data.to_bytes(8, "little") for x in arrays)
    launch(program, "k", (blocks,), (threads,), arguments, memory)
    return memory.part(arrays[-1].ctypes.data, out.nbytes).view(out.dtype).reshape(out.shape).copy()


def computed(code: str, *operands: np.ndarray, to: Any, last: str = "") -> np.ndarray:
    """One instruction (or a body that sets %y from %x0, %x1 ...) for each element, a thread each."""
    to, body = np.dtype(to), []
    truth = to.kind == "b"
    for i, x in enumerate(operands):
        size = x.dtype.itemsize
        body.append(f".reg .b{8 * size} %x{i};  .reg .b64 %at{i};  mad.wide.u32 %at{i}, %tid, {size}, %d{i};")
        body.append(f"ld.global.b{8 * size} %x{i}, [%at{i}];")
    wide = 4 if truth else to.itemsize
    body.append(f".reg .b{8 * wide} %y;  .reg .b64 %to;  mad.wide.u32 %to, %tid, {wide}, %out;")
    if ";" in code:
        body.append(code)
    else:
        target = "%p1" if truth else "%y"
        names = [target, *(f"%x{i}" for i in range(len(operands))), *([last] if last else [])]
        body.append(f"{code} {', '.join(names)};")
    if truth:
        body.append("selp.b32 %y, 1, 0, %p1;")
    body.append(f"st.global.b{8 * wide} [%to], %y;")
    count = len(operands[0])
    out = np.zeros(count, np.uint32 if truth else to)
    pieces = [slice(i, i + 1024) for i in range(0, count, 1024)]
    found = [run("\n".join(body), len(out[s]), *(x[s] for x in operands), out=out[s]) for s in pieces]
    return np.concatenate(found).astype(to) if truth else np.concatenate(found)
