"""The element function of a generated CUDA kernel: ``tg_element<N>`` loads, computes and stores N neighbours.

Numbers are arguments, so a new value compiles nothing.  Interiors are registers; each value is rounded to its dtype, so
that a value which another kernel stores has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.core.primitive import Drawn, Elementwise, Reduction
from tapegrad.device import cuda_types
from tapegrad.device.dtypes import accumulator
from tapegrad.engine.cuda.layout import BY_DIMS, EACH, LINE, ONE, PACK, RESULT, ROW, SAME, STRIDED, VALUE, Loop
from tapegrad.engine.region import Region, Stages
from tapegrad.errors import KernelError

KEY = "const tg_uint64"
"""The type of a key's halves, and of a position."""

TILED = "tg_bits16"
"""The drawing of which a thread that walks a tile uses every bit (see LANES in ``device/numerics/bits.py``)."""

UNIFORM = {4: 8, 8: 4}
"""By size of a number: how many uniform numbers a block of random words makes."""


@dataclass(frozen=True)
class Reduced:
    """A reduction of the kernel: the ufunc's name, the accumulator's dtype, the result's dtype."""

    ufunc: str
    wide: Any
    dtype: Any


def reductions_of(totals: list[Buffer]) -> list[Reduced]:
    """How each of the reductions ``totals`` adds up."""
    return [
        Reduced(prim.ufunc, accumulator(b.node.params.get("dtype") or b.node.aval.dtype), b.node.aval.dtype)
        for b in totals
        if isinstance(prim := b.node.prim, Reduction)
    ]


def drawn_of(region: Region) -> list[Buffer]:
    """The nodes that draw random numbers, whose keys are arguments."""
    return [b for b in region.order if isinstance(b.node.prim, Drawn)]


def template_of(b: Buffer) -> str | None:
    """What draws the numbers of a node, if it draws any."""
    return b.node.prim.template if isinstance(b.node.prim, Drawn) else None


def sharing_of(drawn: list[Buffer], vec: int) -> int:
    """How many packs of ``vec`` elements share a block of random words: more than one where all draws are uniform."""
    kinds = {(template_of(b), b.node.aval.dtype) for b in drawn}
    if vec == 1 or len(kinds) != 1:
        return 1
    ((kind, dtype),) = kinds
    return max(1, UNIFORM[dtype.itemsize] // vec) if kind == "tg_uniform" else 1


def _reading(dtype: Any, kind: str) -> str:
    """The type of the parameter for a leaf."""
    return f"const {cuda_types.compute(dtype)}" if kind == VALUE else f"const {cuda_types.storage(dtype)}* __restrict__"


def late_of(region: Region, stages: Stages) -> list[int]:
    """Numbers of the leaves that what follows a reduction reads."""
    read = {id(k) for b in stages.epilogue for k in b.inputs}
    return [i for i, b in enumerate(region.leaves) if id(b) in read]


class Element:
    """Writes the element function, and what follows a reduction; ``name`` gives each buffer its C++ variable."""

    def __init__(self, region: Region, stages: Stages, targets: list[Buffer], kinds: list[str], loop: Loop) -> None:
        self.region, self.stages, self.kinds, self.loop = region, stages, kinds, loop
        self.full, self.results = stages.divide(targets)
        self.reductions = reductions_of(stages.totals)
        self.drawn = drawn_of(region)
        self.late = late_of(region, stages)
        self.by_dims = [i for i, kind in enumerate(kinds) if kind in BY_DIMS]
        self.tiled = [i for i, b in enumerate(self.drawn) if self._is_tiled(b)]
        self.sharing = 1 if self.reductions else sharing_of(self.drawn, loop.vec)
        self.name: dict[int, str] = {}
        self.number = {id(b): i for i, b in enumerate(region.order)}

    def _is_tiled(self, b: Buffer) -> bool:
        """Whether the kernel around draws a block for four packs: sixteen-bit numbers, packs of four, no reduction."""
        return template_of(b) == TILED and self.loop.vec == 4 and not self.reductions

    def params(self) -> list[tuple[str, str]]:
        """(type, name) of what the kernel and ``tg_element`` take: leaves, keys, outputs, dimensions, strides."""
        found = []
        for i, (b, kind) in enumerate(zip(self.region.leaves, self.kinds)):
            dtype = b.node.aval.dtype
            found.append((_reading(dtype, kind), f"x{i}"))
        for i in range(len(self.drawn)):
            found += [(KEY, f"{part}{i}") for part in ("lo", "hi", "at")]
        for i, b in enumerate(self.full):
            found.append((f"{cuda_types.storage(b.node.aval.dtype)}* __restrict__", f"y{i}"))
        if self.by_dims:
            found += [("const tg_index", f"n{d}") for d in range(1, len(self.loop.dims))]
            for i in self.by_dims:
                found += [("const tg_index", f"s{i}_{d}") for d in range(len(self.loop.dims))]
        return found

    def text(self) -> str:
        """The function.  ``M``: how many accumulators it adds to, N where neighbours belong to different results."""
        params = [f"{kind} {name}" for kind, name in self.params()]
        params += [f"const tg_uint64 word{i}" for i in self.tiled]
        if self.sharing > 1:
            params += [f"const {self.block(i)}& d{i}" for i in range(len(self.drawn))]
        sums = [f"{cuda_types.compute(r.wide)} (&t{i})[M]" for i, r in enumerate(self.reductions)]
        head = ", ".join(["const tg_index i", *params, *sums])
        template = "template <int N, int M>" if sums else "template <int N>"
        lines = [template, f"__device__ __forceinline__ void tg_element({head}) {{"]
        lines += [f"    {line}" for line in self._before()]
        lines += ["#pragma unroll", "    for (int j = 0; j < N; ++j) {"]
        lines += [f"        {line}" for line in self._body()]
        lines += ["    }"]
        lines += [f"    tg_store_pack<N>(y{i} + i, b{i});" for i in range(len(self.full))]
        return "\n".join([*lines, "}"])

    def _before(self) -> list[str]:
        """Loads of whole packs, places of leaves with strides, drawing, and packs for the results."""
        lines = []
        if self.by_dims:
            lines += self._places()
        for i, (b, kind) in enumerate(zip(self.region.leaves, self.kinds)):
            pack = f"const tg_pack<{cuda_types.storage(b.node.aval.dtype)}, N> a{i}"
            if kind == PACK:
                lines.append(f"{pack} = tg_load_pack<N>(x{i} + i);")
            elif kind == EACH:
                lines.append(f"{pack} = tg_load_each<N>(x{i} + i);")
            elif kind == ROW:
                lines.append(f"{pack} = tg_load_pack<N>(x{i} + p{i});")
            elif kind in (ONE, SAME):
                place = "0" if kind == ONE else f"p{i}"
                lines.append(f"const {cuda_types.compute(b.node.aval.dtype)} a{i} = tg_load(x{i}[{place}]);")
        for i, b in enumerate(self.drawn):
            drawing = template_of(b)
            if i in self.tiled or self.sharing > 1:
                continue
            lines.append(f"const {drawing}<{cuda_types.storage(b.node.aval.dtype)}, N> d{i}(lo{i}, hi{i}, at{i}, i);")
        for i, b in enumerate(self.full):
            lines.append(f"tg_pack<{cuda_types.storage(b.node.aval.dtype)}, N> b{i};")
        return lines

    def _places(self) -> list[str]:
        """The offsets of the leaves read by strides, at the pack's first element."""
        rank = len(self.loop.dims)
        lines = ["tg_index q = i;"]
        for d in range(rank - 1, 0, -1):
            lines += [f"const tg_index c{d} = q % n{d};", f"q /= n{d};"]
        for i in self.by_dims:
            if self.kinds[i] == STRIDED:
                continue
            terms = [f"q * s{i}_0", *(f"c{d} * s{i}_{d}" for d in range(1, rank))]
            lines.append(f"const tg_index p{i} = {' + '.join(terms)};")
        return lines if any(self.kinds[i] != STRIDED for i in self.by_dims) else []

    def _body(self) -> list[str]:
        """The arithmetic of one element."""
        lines = self._element_places()
        for i, (b, kind) in enumerate(zip(self.region.leaves, self.kinds)):
            if kind == RESULT:
                continue
            wide = cuda_types.compute(b.node.aval.dtype)
            source = {
                PACK: f"tg_load(a{i}.at[j])", EACH: f"tg_load(a{i}.at[j])", ROW: f"tg_load(a{i}.at[j])",
                LINE: f"tg_load(x{i}[p{i} + j * s{i}_{len(self.loop.dims) - 1}])", STRIDED: f"tg_load(x{i}[e{i}])",
                ONE: f"a{i}", SAME: f"a{i}", VALUE: f"x{i}",
            }[kind]  # fmt: skip
            lines.append(f"const {wide} l{i} = {source};")
            self.name[id(b)] = f"l{i}"
        drawn = {id(b): i for i, b in enumerate(self.drawn)}
        for b in self.stages.loop:
            lines.append(self._statement(b, self._draw(drawn[id(b)]) if id(b) in drawn else self._expression(b)))
        for i, b in enumerate(self.full):
            lines.append(f"b{i}.at[j] = tg_store<{cuda_types.storage(b.node.aval.dtype)}>({self.name[id(b)]});")
        for i, (b, r) in enumerate(zip(self.stages.totals, self.reductions)):
            wide = cuda_types.compute(r.wide)
            value = f"tg_cast<{wide}>({self.name[id(b.inputs[0])]})"
            lines.append(f"t{i}[j % M] = tg_{r.ufunc}<{wide}>::join(t{i}[j % M], {value});")
        return lines

    def _statement(self, b: Buffer, value: str) -> str:
        """The definition of the variable of node ``b``, rounded to its dtype."""
        dtype, number = b.node.aval.dtype, self.number[id(b)]
        if cuda_types.is_half(dtype):
            value = f"tg_round_to<{cuda_types.storage(dtype)}>({value})"
        self.name[id(b)] = f"v{number}"
        return f"const {cuda_types.compute(dtype)} v{number} = {value};  // {b.node.prim.name}"

    def delivered(self, index: str) -> list[str]:
        """Statements that take the totals ``z0``, ... of result number ``index`` on to the outputs ``r0``, ..."""
        lines = []
        for i, (b, r) in enumerate(zip(self.stages.totals, self.reductions)):
            lines.append(self._statement(b, f"tg_cast<{cuda_types.compute(r.dtype)}>(z{i})"))
        for i in self.late:
            leaf, kind = self.region.leaves[i], self.kinds[i]
            place = {VALUE: f"x{i}", ONE: f"tg_load(x{i}[0])"}.get(kind, f"tg_load(x{i}[{index}])")
            lines.append(f"const {cuda_types.compute(leaf.node.aval.dtype)} e{i} = {place};")
            self.name[id(leaf)] = f"e{i}"
        lines += [self._statement(b, self._expression(b)) for b in self.stages.epilogue]
        for i, b in enumerate(self.results):
            lines.append(f"r{i}[{index}] = tg_store<{cuda_types.storage(b.node.aval.dtype)}>({self.name[id(b)]});")
        return lines

    def result_params(self) -> list[tuple[str, str]]:
        """(type, name) of the outputs of the reductions and of what follows them."""
        return [(f"{cuda_types.storage(b.node.aval.dtype)}* __restrict__", f"r{i}") for i, b in enumerate(self.results)]

    def _draw(self, i: int) -> str:
        if i in self.tiled:
            return f"static_cast<tg_uint16>(word{i} >> (16 * ((i + j) & 3)))"
        return f"d{i}.at(j)" if self.sharing == 1 else f"d{i}.at(static_cast<int>(i + j) & (d{i}.per - 1))"

    def block(self, i: int) -> str:
        """The type of all uniform numbers of a block of what is drawn as number ``i``."""
        dtype = self.drawn[i].node.aval.dtype
        return f"tg_uniform<{cuda_types.storage(dtype)}, {UNIFORM[dtype.itemsize]}>"

    def _element_places(self) -> list[str]:
        strided = [i for i in self.by_dims if self.kinds[i] == STRIDED]
        if not strided:
            return []
        rank = len(self.loop.dims)
        lines = ["tg_index o = i + j;"]
        for d in range(rank - 1, 0, -1):
            lines += [f"const tg_index k{d} = o % n{d};", f"o /= n{d};"]
        for i in strided:
            terms = [f"o * s{i}_0", *(f"k{d} * s{i}_{d}" for d in range(1, rank))]
            lines.append(f"const tg_index e{i} = {' + '.join(terms)};")
        return lines

    def _expression(self, b: Buffer) -> str:
        prim = b.node.prim
        if not isinstance(prim, Elementwise) or prim.cxx is None:
            raise KernelError(f"{prim.name}: this elementwise primitive declares no CUDA expression (cxx=)")
        names = {name: self.name[id(k)] for name, k in zip(prim.operands, b.inputs)}
        first = b.inputs[0].node.aval.dtype if b.inputs else b.node.aval.dtype
        out = cuda_types.compute(
            first if prim.converts and cuda_types.is_half(b.node.aval.dtype) else b.node.aval.dtype
        )
        found = prim.cxx.format(**names, type=cuda_types.compute(first), out_type=out)
        return f"{out}({found})"
