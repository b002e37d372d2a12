"""A region's CUDA C++: a pure function of the region's structure and of how its arrays lie (``cuda_layout``).

Numbers are arguments, so a new value compiles nothing.  Interiors are registers; each value is rounded to its dtype, so
that a value which another kernel stores has the same bits.  One function, ``tg_element<N>``, evaluates N neighbours;
the kernel around it walks an array, rows that are reduced, or columns that are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.buffer import Buffer
from tapegrad.device import cxx
from tapegrad.device.dtypes import accumulator
from tapegrad.errors import KernelError
from tapegrad.fusion.cuda_layout import BY_DIMS, EACH, LINE, ONE, PACK, ROW, SAME, STRIDED, VALUE, Loop
from tapegrad.fusion.region import Region

ROW_WARP, ROW_BLOCK, COLUMN = "row of a warp", "row of a block", "column"


@dataclass(frozen=True)
class Form:
    """What decides the loop around the elements: None for no reduction, else how it walks; ``split``: in parts."""

    walk: str | None = None
    split: bool = False


@dataclass(frozen=True)
class Reduced:
    """A reduction of the kernel: the ufunc's name, the accumulator's dtype, the result's dtype."""

    ufunc: str
    wide: Any
    dtype: Any


def text_of(region: Region, targets: list[Buffer], kinds: list[str], loop: Loop, form: Form) -> str:
    """The kernel ``tg_fused`` that evaluates ``targets``."""
    return _Writer(region, targets, kinds, loop, form).text()


def reductions_of(targets: list[Buffer]) -> list[Reduced]:
    """The reductions among ``targets``."""
    return [
        Reduced(b.node.prim.reduce, accumulator(b.node.params.get("dtype") or b.node.aval.dtype), b.node.aval.dtype)
        for b in targets
        if b.node.prim is not None and b.node.prim.reduce is not None
    ]


def drawn_of(region: Region) -> list[Buffer]:
    """The nodes that draw random numbers, whose keys are arguments."""
    return [b for b in region.order if b.node.prim.cxx_drawn is not None]  # type: ignore[union-attr]


class _Writer:
    """Writes one kernel; ``self.name`` gives each buffer its C++ variable."""

    def __init__(self, region: Region, targets: list[Buffer], kinds: list[str], loop: Loop, form: Form) -> None:
        self.region, self.targets, self.kinds, self.loop, self.form = region, targets, kinds, loop, form
        self.full = [b for b in targets if b.node.prim.reduce is None]  # type: ignore[union-attr]
        self.totals = [b for b in targets if b.node.prim.reduce is not None]  # type: ignore[union-attr]
        self.reductions = reductions_of(targets)
        self.drawn = drawn_of(region)
        self.by_dims = [i for i, kind in enumerate(kinds) if kind in BY_DIMS]
        self.name: dict[int, str] = {}

    def text(self) -> str:
        parts = ['#include "scalar.cuh"']
        if self.reductions:
            parts.append('#include "reduce.cuh"')
        if self.drawn:
            parts.append('#include "drawn.cuh"')
        index = "long long" if self.loop.wide else "int"
        parts += [f"typedef {index} tg_index;", "", self._element(), "", self._kernel(), ""]
        if self.form.split:
            parts += [finishing(self.reductions, self.form.walk == COLUMN), ""]
        return "\n".join(parts)

    # ---- parameters: leaves, drawing keys, outputs, dimensions, strides

    def _shared_params(self) -> list[tuple[str, str]]:
        """(type, name) of what both the kernel and ``tg_element`` take."""
        found = []
        for i, (b, kind) in enumerate(zip(self.region.leaves, self.kinds)):
            dtype = b.node.aval.dtype
            if kind == VALUE:
                found.append((f"const {cxx.compute(dtype)}", f"x{i}"))
            else:
                found.append((f"const {cxx.storage(dtype)}* __restrict__", f"x{i}"))
        for i in range(len(self.drawn)):
            found += [("const tg_uint64", f"{part}{i}") for part in ("lo", "hi", "at")]
        for i, b in enumerate(self.full):
            found.append((f"{cxx.storage(b.node.aval.dtype)}* __restrict__", f"y{i}"))
        if self.by_dims:
            found += [("const tg_index", f"n{d}") for d in range(1, len(self.loop.dims))]
            for i in self.by_dims:
                found += [("const tg_index", f"s{i}_{d}") for d in range(len(self.loop.dims))]
        return found

    # ---- the element function

    def _element(self) -> str:
        params = [f"{kind} {name}" for kind, name in self._shared_params()]
        sums = [f"{cxx.compute(r.wide)} (&t{i})[M]" for i, r in enumerate(self.reductions)]
        head = ", ".join(["const tg_index i", *params, *sums])
        template = "template <int N, int M>" if sums else "template <int N>"
        lines = [template, f"__device__ __forceinline__ void tg_element({head}) {{"]
        lines += [f"    {line}" for line in self._before()]
        lines += ["#pragma unroll", "    for (int j = 0; j < N; ++j) {"]
        lines += [f"        {line}" for line in self._body()]
        lines += ["    }"]
        for i, b in enumerate(self.full):
            lines.append(f"    tg_store_pack<N>(y{i} + i, b{i});")
        return "\n".join([*lines, "}"])

    def _before(self) -> list[str]:
        """Loads of whole packs, places of leaves with strides, drawing, and packs for the results."""
        lines = []
        if self.by_dims:
            lines += self._places()
        for i, (b, kind) in enumerate(zip(self.region.leaves, self.kinds)):
            pack = f"const tg_pack<{cxx.storage(b.node.aval.dtype)}, N> a{i}"
            if kind == PACK:
                lines.append(f"{pack} = tg_load_pack<N>(x{i} + i);")
            elif kind == EACH:
                lines.append(f"{pack} = tg_load_each<N>(x{i} + i);")
            elif kind == ROW:
                lines.append(f"{pack} = tg_load_pack<N>(x{i} + p{i});")
            elif kind in (ONE, SAME):
                place = "0" if kind == ONE else f"p{i}"
                lines.append(f"const {cxx.compute(b.node.aval.dtype)} a{i} = tg_load(x{i}[{place}]);")
        for i, b in enumerate(self.drawn):
            kind = b.node.prim.cxx_drawn  # type: ignore[union-attr]
            lines.append(f"const {kind}<{cxx.storage(b.node.aval.dtype)}, N> d{i}(lo{i}, hi{i}, at{i}, i);")
        for i, b in enumerate(self.full):
            lines.append(f"tg_pack<{cxx.storage(b.node.aval.dtype)}, N> b{i};")
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
            wide = cxx.compute(b.node.aval.dtype)
            source = {
                PACK: f"tg_load(a{i}.at[j])", EACH: f"tg_load(a{i}.at[j])", ROW: f"tg_load(a{i}.at[j])",
                LINE: f"tg_load(x{i}[p{i} + j * s{i}_{len(self.loop.dims) - 1}])", STRIDED: f"tg_load(x{i}[e{i}])",
                ONE: f"a{i}", SAME: f"a{i}", VALUE: f"x{i}",
            }[kind]  # fmt: skip
            lines.append(f"const {wide} l{i} = {source};")
            self.name[id(b)] = f"l{i}"
        drawn = {id(b): i for i, b in enumerate(self.drawn)}
        for number, b in enumerate(self.region.order):
            prim: Any = b.node.prim
            if prim.reduce is not None:
                continue
            dtype = b.node.aval.dtype
            value = f"d{drawn[id(b)]}.at(j)" if id(b) in drawn else self._expression(b)
            if cxx.is_half(dtype):
                value = f"tg_round_to<{cxx.storage(dtype)}>({value})"
            lines.append(f"const {cxx.compute(dtype)} v{number} = {value};  // {prim.name}")
            self.name[id(b)] = f"v{number}"
        for i, b in enumerate(self.full):
            lines.append(f"b{i}.at[j] = tg_store<{cxx.storage(b.node.aval.dtype)}>({self.name[id(b)]});")
        for i, (b, r) in enumerate(zip(self.totals, self.reductions)):
            wide = cxx.compute(r.wide)
            value = f"tg_cast<{wide}>({self.name[id(b.keeps[0])]})"
            lines.append(f"t{i}[j % M] = tg_{r.ufunc}<{wide}>::join(t{i}[j % M], {value});")
        return lines

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
        prim: Any = b.node.prim
        if prim.cxx is None:
            raise KernelError(f"{prim.name}: this elementwise primitive declares no CUDA expression (cxx=)")
        names = {name: self.name[id(k)] for name, k in zip(prim.operands, b.keeps)}
        first = b.keeps[0].node.aval.dtype if b.keeps else b.node.aval.dtype
        out = cxx.compute(b.node.aval.dtype)
        found = prim.cxx.format(**names, type=cxx.compute(first), out_type=out)
        return f"{out}({found})"

    # ---- the kernel around it

    def _kernel(self) -> str:
        params = [f"{kind} {name}" for kind, name in self._shared_params()]
        for i, r in enumerate(self.reductions):
            kind = cxx.compute(r.wide) if self.form.split else cxx.storage(r.dtype)
            params.append(f"{kind}* __restrict__ r{i}")
        if self.reductions:
            params += ["const tg_index kept", "const tg_index reduced", "const tg_index chunk"]
            params += [f"const tg_index g{d}" for d in range(1, len(self.loop.kept))]
            params += [f"const tg_index u{d}" for d in range(len(self.loop.kept))]
            params += [f"const tg_index h{d}" for d in range(1, len(self.loop.reduced))]
            params += [f"const tg_index w{d}" for d in range(len(self.loop.reduced))]
        else:
            params.append("const tg_index size")
        body = {None: self._flat, ROW_WARP: self._rows, ROW_BLOCK: self._rows, COLUMN: self._columns}[self.form.walk]()
        head = 'extern "C" __global__ void __launch_bounds__(256) tg_fused('
        return "\n".join([head, "    " + ",\n    ".join(params) + ") {", *(f"    {line}" for line in body), "}"])

    def _call(self, count: Any, lanes: Any, index: str) -> str:
        names = [name for _, name in self._shared_params()]
        sums = [f"t{i}" for i in range(len(self.reductions))]
        template = f"<{count}, {lanes}>" if sums else f"<{count}>"
        return f"tg_element{template}({', '.join([index, *names, *sums])});"

    def _flat(self) -> list[str]:
        vec = self.loop.vec
        lines = [
            "const tg_index first = tg_index(blockIdx.x) * 256 + threadIdx.x;",
            "const tg_index step = tg_index(gridDim.x) * 256;",
            f"const tg_index packs = size / {vec};",
            f"for (tg_index p = first; p < packs; p += step) {self._call(vec, 1, f'p * {vec}')}",
        ]
        if vec > 1:
            lines += [f"const tg_index rest = packs * {vec} + first;", f"if (rest < size) {self._call(1, 1, 'rest')}"]
        return lines

    def _offset(self, name: str, index: str, lengths: str, strides: str, count: int) -> list[str]:
        """Statements that take ``index`` apart into merged dimensions and add up its linear offset as ``name``."""
        if not count:
            return [f"const tg_index {name} = 0;"]
        if count == 1:
            return [f"const tg_index {name} = {index} * {strides}0;"]
        lines = [f"tg_index {name} = 0;", "{", f"    tg_index z = {index};"]
        for d in range(count - 1, 0, -1):
            lines += [f"    {name} += z % {lengths}{d} * {strides}{d};", f"    z /= {lengths}{d};"]
        return [*lines, f"    {name} += z * {strides}0;", "}"]

    def _totals(self, lanes: int) -> list[str]:
        lines = []
        for i, r in enumerate(self.reductions):
            wide = cxx.compute(r.wide)
            fill = ", ".join([f"tg_{r.ufunc}<{wide}>::identity()"] * lanes)
            lines.append(f"{wide} t{i}[{lanes}] = {{{fill}}};")
        return lines

    def _rows(self) -> list[str]:
        """A warp or a block adds up a row: thread t takes packs t, t + threads, ... of four, whatever is loaded."""
        threads = 32 if self.form.walk == ROW_WARP else 256
        vec, rank = self.loop.vec, len(self.loop.reduced)
        lines = [
            f"const int lane = threadIdx.x % {threads};",
            f"const tg_index k = tg_index(blockIdx.x) * {256 // threads} + threadIdx.x / {threads};",
            "if (k >= kept) return;",
            "const tg_index from = tg_index(blockIdx.y) * chunk;",
            "const tg_index to = from + chunk < reduced ? from + chunk : reduced;",
            *self._offset("base", "k", "g", "u", len(self.loop.kept)),
            *self._totals(1),
            f"for (tg_index r = from + lane * 4; r < to; r += {threads} * 4) {{",
        ]
        if vec == 4:
            lines += [f"    {line}" for line in self._offset("step", "r", "h", "w", rank)]
            lines.append(f"    {self._call(4, 1, 'base + step')}")
        else:
            lines += ["    for (tg_index e = r; e < r + 4 && e < to; ++e) {"]
            lines += [f"        {line}" for line in self._offset("step", "e", "h", "w", rank)]
            lines += [f"        {self._call(1, 1, 'base + step')}", "    }"]
        lines.append("}")
        place = "k * gridDim.y + blockIdx.y" if self.form.split else "k"
        for i, r in enumerate(self.reductions):
            wide = cxx.compute(r.wide)
            op = f"tg_{r.ufunc}<{wide}>"
            if threads == 32:
                lines.append(f"const {wide} z{i} = tg_warp_reduce<{op}>(t{i}[0]);")
            else:
                lines.append(f"__shared__ {wide} m{i}[8];")
                lines.append(f"const {wide} z{i} = tg_block_reduce<{op}, 256>(t{i}[0], m{i});")
            value = f"z{i}" if self.form.split else f"tg_store<{cxx.storage(r.dtype)}>(z{i})"
            lines.append(f"if (lane == 0) r{i}[{place}] = {value};")
        return lines

    def _columns(self) -> list[str]:
        """32 lanes beside each other, each with ``vec`` columns; 8 walkers take every eighth row, then join in order."""
        vec = self.loop.vec
        lines = [
            "const int lane = threadIdx.x % 32, walker = threadIdx.x / 32;",
            f"const tg_index k = (tg_index(blockIdx.x) * 32 + lane) * {vec};",
            "const tg_index from = tg_index(blockIdx.y) * chunk;",
            "const tg_index to = from + chunk < reduced ? from + chunk : reduced;",
            *self._totals(vec),
            "if (k < kept) {",
            *(f"    {line}" for line in self._offset("base", "k", "g", "u", len(self.loop.kept))),
            "    for (tg_index r = from + walker; r < to; r += 8) {",
            *(f"        {line}" for line in self._offset("step", "r", "h", "w", len(self.loop.reduced))),
            f"        {self._call(vec, vec, 'base + step')}",
            "    }",
            "}",
        ]
        for i, r in enumerate(self.reductions):
            wide = cxx.compute(r.wide)
            value = f"z{i}" if self.form.split else f"tg_store<{cxx.storage(r.dtype)}>(z{i})"
            place = "blockIdx.y * kept + k + j" if self.form.split else "k + j"
            lines += [
                f"__shared__ {wide} m{i}[8][32];",
                "#pragma unroll",
                f"for (int j = 0; j < {vec}; ++j) {{",
                f"    m{i}[walker][lane] = t{i}[j];",
                "    __syncthreads();",
                "    if (walker == 0 && k < kept) {",
                f"        {wide} z{i} = m{i}[0][lane];",
                f"        for (int w = 1; w < 8; ++w) z{i} = tg_{r.ufunc}<{wide}>::join(z{i}, m{i}[w][lane]);",
                f"        r{i}[{place}] = {value};",
                "    }",
                "    __syncthreads();",
                "}",
            ]
        return lines


def finishing(reductions: list[Reduced], columns: bool) -> str:
    """The kernel ``tg_finish`` that joins the parts of split reductions, in order.

    Parts lie result by result where rows were reduced (a warp joins them), else part by part (a thread joins them).
    """
    params = []
    for i, r in enumerate(reductions):
        params += [f"const {cxx.compute(r.wide)}* __restrict__ p{i}", f"{cxx.storage(r.dtype)}* __restrict__ r{i}"]
    params += ["const tg_index kept", "const tg_index parts"]
    if columns:
        body = ["const tg_index k = tg_index(blockIdx.x) * 256 + threadIdx.x;", "if (k >= kept) return;"]
    else:
        body = [
            "const int lane = threadIdx.x % 32;",
            "const tg_index k = tg_index(blockIdx.x) * 8 + threadIdx.x / 32;",
            "if (k >= kept) return;",
        ]
    for i, r in enumerate(reductions):
        wide, op = cxx.compute(r.wide), f"tg_{r.ufunc}<{cxx.compute(r.wide)}>"
        body.append(f"{wide} t{i} = {op}::identity();")
        if columns:
            body.append(f"for (tg_index c = 0; c < parts; ++c) t{i} = {op}::join(t{i}, p{i}[c * kept + k]);")
            body.append(f"r{i}[k] = tg_store<{cxx.storage(r.dtype)}>(t{i});")
        else:
            body.append(f"for (tg_index c = lane; c < parts; c += 32) t{i} = {op}::join(t{i}, p{i}[k * parts + c]);")
            body.append(f"t{i} = tg_warp_reduce<{op}>(t{i});")
            body.append(f"if (lane == 0) r{i}[k] = tg_store<{cxx.storage(r.dtype)}>(t{i});")
    head = 'extern "C" __global__ void __launch_bounds__(256) tg_finish('
    return "\n".join([head, "    " + ",\n    ".join(params) + ") {", *(f"    {line}" for line in body), "}"])
