"""What the threads of a warp do together: shuffles, votes, matrix products (PTX ISA, sections 9.7.9 and 9.7.14).

Each maker gives what runs once all threads that the mask names have come; ``MEMBERS`` says which operand the mask is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import Fault
from .operands import Lanes, Read, Run, Scope, handles, words
from .parse import Address, Instruction, Pair, PTXError, Vector

F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64
MEMBERS = {"shfl": -1, "vote": -1, "match": -1, "redux": -1, "bar.warp.sync": 0}
"""Of each instruction of a warp the operand that is its mask; those not here are of the whole warp."""
WHOLE = ("mma", "ldmatrix")


@handles("shfl")
def _shfl(scope: Scope, ins: Instruction) -> Run:
    given = words(ins, "sync", "up", "down", "bfly", "idx", "b32")
    mode = next(iter(given & {"up", "down", "bfly", "idx"}))
    target = ins.operands[0]
    to, told = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    write, tell = scope.write(to, "b32"), scope.write(told, "pred")
    value, other, clamps = (scope.read(one, "b32") for one in ins.operands[1:4])

    def run(f: Any, lanes: Lanes) -> None:
        lane = f.lane
        b, c = other(f) & U32(31), clamps(f)
        clamp, segment = c & U32(31), (c >> U32(8)) & U32(31)
        most, least = (lane & segment) | (clamp & ~segment), lane & segment
        if mode == "up":
            source = lane.astype(np.int64) - b
            inside = source >= most
        elif mode == "down":
            source = lane.astype(np.int64) + b
            inside = source <= most
        else:
            source = ((lane ^ b) if mode == "bfly" else (least | (b & ~segment))).astype(np.int64)
            inside = source <= most
        source = np.where(inside, source, lane).astype(np.int64) + f.first_lane
        source = np.minimum(source, f.threads - 1)
        missing = lanes.flags & ~(lanes.flags[source] & (f.warp[source] == f.warp))
        if missing.any():
            raise Fault("shfl.sync reads a lane that takes no part", int(np.flatnonzero(missing)[0]))
        write(f, np.broadcast_to(value(f), f.threads)[source], lanes)
        tell(f, np.broadcast_to(inside, f.threads), lanes)

    return run


def _ballot(f: Any, predicate: np.ndarray, lanes: Lanes) -> np.ndarray:
    """Of each warp the lanes that take part and for which it holds, as bits."""
    bits = np.where(lanes.flags & predicate, U32(1) << f.lane, U32(0)).astype(np.int64)
    return np.bincount(f.warp, bits, f.warps).astype(np.int64).astype(U32)[f.warp]


@handles("vote")
def _vote(scope: Scope, ins: Instruction) -> Run:
    given = words(ins, "sync", "all", "any", "uni", "ballot", "pred", "b32")
    predicate, mask = scope.read(ins.operands[1], "pred"), scope.read(ins.operands[2], "b32")
    write = scope.write(ins.operands[0], "b32" if "ballot" in given else "pred")

    def run(f: Any, lanes: Lanes) -> None:
        found = _ballot(f, np.broadcast_to(predicate(f), f.threads), lanes)
        everybody = mask(f) & _ballot(f, np.ones(f.threads, bool), lanes)
        if "ballot" in given:
            write(f, found, lanes)
        elif "any" in given:
            write(f, found != 0, lanes)
        else:
            write(f, (found == everybody) | ((found == 0) & ("uni" in given)), lanes)

    return run


@handles("activemask")
def _activemask(scope: Scope, ins: Instruction) -> Run:
    write = scope.write(ins.operands[0], "b32")
    return lambda f, lanes: write(f, _ballot(f, np.ones(f.threads, bool), lanes), lanes)


@handles("match")
def _match(scope: Scope, ins: Instruction) -> Run:
    words(ins, "any", "sync", "b32", "b64")
    value, write = scope.read(ins.operands[1], ins.words[-1]), scope.write(ins.operands[0], "b32")

    def run(f: Any, lanes: Lanes) -> None:
        own, out = np.broadcast_to(value(f), f.threads), np.zeros(f.threads, U32)
        for thread in lanes.index:
            same = (f.warp == f.warp[thread]) & lanes.flags & (own == own[thread])
            out[thread] = np.bitwise_or.reduce(U32(1) << f.lane[same])
        write(f, out, lanes)

    return run


@handles("redux")
def _redux(scope: Scope, ins: Instruction) -> Run:
    given, kind = words(ins, "sync", "add", "min", "max", "and", "or", "xor", "u32", "s32", "b32"), ins.words[-1]
    name = next(iter(given & {"add", "min", "max", "and", "or", "xor"}))
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}[name].reduce  # fmt: skip
    value, write = scope.read(ins.operands[1], kind), scope.write(ins.operands[0], kind)

    def run(f: Any, lanes: Lanes) -> None:
        own = np.broadcast_to(value(f), f.threads)
        out = np.zeros(f.threads, own.dtype)
        for warp in np.unique(f.warp[lanes.index]):
            mine = lanes.flags & (f.warp == warp)
            out[mine] = reduce(own[mine])
        write(f, out, lanes)

    return run


# ---- matrix products: the rows and columns of each element of a fragment, by lane


def _fragments(rows: int, depth: int, per: int) -> tuple[Any, Any, Any]:
    """Where elements lie: of A and B lists of (row, column) arrays over lanes, register by register, of C as well."""
    lane = np.arange(32)
    group, inner = lane >> 2, lane & 3
    step = 4 * per  # columns that one register of each lane spans
    a = [(group + 8 * half, inner * per + e + step * block) for block in range(depth // step) for half in (0, 1)
         for e in range(per)]  # fmt: skip
    b = [(inner * per + e + step * block, group) for block in range(depth // step) for e in range(per)]
    c = [(group + 8 * half, inner * 2 + e) for half in (0, 1) for e in (0, 1)]
    assert rows == 16
    return a, b, c


def _elements(reads: list[Read], f: Any, kind: str) -> list[np.ndarray]:
    """The numbers that a fragment's registers hold, in float64, each over all threads."""
    out = []
    for read in reads:
        bits = np.broadcast_to(read(f), f.threads)
        if kind == "tf32":
            out.append((bits & U32(0xFFFFE000)).view(F32).astype(F64))
            continue
        for half in (bits & U32(0xFFFF), bits >> U32(16)):
            narrow = half.astype(np.uint16)
            wide = narrow.view(np.float16) if kind == "f16" else (half << U32(16)).view(F32)
            out.append(wide.astype(F64))
    return out


@handles("mma")
def _mma(scope: Scope, ins: Instruction) -> Run:
    shape, kind = ins.words[3], ins.words[-2]
    known = {"m16n8k16": ("f16", "bf16"), "m16n8k8": ("f16", "bf16", "tf32"), "m16n8k4": ("tf32",)}
    form = ("mma", "sync", "aligned", shape, "row", "col", "f32", kind, kind, "f32")
    if kind not in known.get(shape, ()) or ins.words != form:
        raise PTXError("a matrix product that is not known")
    depth, per = int(shape.split("k")[1]), 1 if kind == "tf32" else 2
    at_a, at_b, at_c = _fragments(16, depth, per)
    vectors = [one.items for one in ins.operands if isinstance(one, Vector)]
    if [len(one) for one in vectors] != [4, len(at_a) // per, len(at_b) // per, 4]:
        raise PTXError("fragments of another size")
    d, (a, b, c) = vectors[0], ([scope.read(one, "b32") for one in vector] for vector in vectors[1:])
    writes = [scope.write(one, "b32") for one in d]

    def run(f: Any, lanes: Lanes) -> None:
        left, right = np.zeros((f.warps, 16, depth)), np.zeros((f.warps, depth, 8))
        for (row, column), x in zip(at_a, _elements(a, f, kind)):
            left[f.warp, row[f.lane], column[f.lane]] = x
        for (row, column), x in zip(at_b, _elements(b, f, kind)):
            right[f.warp, row[f.lane], column[f.lane]] = x
        product = np.zeros((f.warps, 16, 8))
        for k in range(depth):  # in order, as the host does it
            product += left[:, :, k, None] * right[:, k, None, :]
        for (row, column), read, write in zip(at_c, c, writes):
            total = product[f.warp, row[f.lane], column[f.lane]] + np.broadcast_to(read(f), f.threads).view(F32)
            write(f, total.astype(F32).view(U32), lanes)

    return run


@handles("ldmatrix")
def _ldmatrix(scope: Scope, ins: Instruction) -> Run:
    given = words(ins, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    targets = ins.operands[0].items if isinstance(ins.operands[0], Vector) else ins.operands[:1]
    if not isinstance(ins.operands[1], Address) or f"x{len(targets)}" not in given:
        raise PTXError("a load of matrices that is not known")
    place, _ = scope.place(ins.operands[1])
    writes = [scope.write(one, "b32") for one in targets]

    def run(f: Any, lanes: Lanes) -> None:
        address = place(f)
        for number, write in enumerate(writes):
            giving = np.flatnonzero(lanes.flags & (f.lane // 8 == number))
            rows = f.spaces["shared"].load(address[giving], giving, 2, 8) if _aligned(address[giving], giving) else []
            matrix = np.zeros((f.warps, 8, 8), np.uint16)
            matrix[f.warp[giving], f.lane[giving] % 8] = np.stack(rows, axis=1)
            if "trans" in given:
                matrix = matrix.swapaxes(1, 2)
            pair = np.ascontiguousarray(matrix).view(U32).reshape(f.warps, 32)
            write(f, pair[f.warp, f.lane], lanes)

    return run


def _aligned(address: np.ndarray, threads: np.ndarray) -> bool:
    odd = address % 16 != 0
    if odd.any():
        raise Fault("a row of ldmatrix is not aligned", int(threads[np.flatnonzero(odd)[0]]))
    return True
