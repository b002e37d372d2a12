"""A region's CUDA C++: a pure function of the region's structure and of how its arrays lie (``layout``).

The element function (``element``) evaluates N neighbours; the kernel around it walks an array, rows that are
reduced, or columns that are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.core.buffer import Buffer
from tapegrad.device import cuda_types
from tapegrad.engine.cuda.element import KEY, Element
from tapegrad.engine.cuda.layout import Loop
from tapegrad.engine.region import Region, Stages

ROW, COLUMN = "row", "column"


@dataclass(frozen=True)
class Form:
    """What decides the loop around the elements: None for no reduction, else how it walks; ``split``: in parts.

    ``lanes``: threads of a row (256: a block), or beside each other on a line of columns; ``tiled``: without a
    reduction, whether a block walks whole tiles of random numbers; ``sharing``: packs that a thread walks because one
    block of random words serves them; ``held``: whether the keys of random numbers are read from memory.
    """

    walk: str | None = None
    split: bool = False
    lanes: int = 32
    tiled: bool = False
    sharing: int = 1
    held: bool = False


def text_of(region: Region, stages: Stages, targets: list[Buffer], kinds: list[str], loop: Loop, form: Form) -> str:
    """The kernel ``tg_fused`` that evaluates ``targets``."""
    return _Writer(Element(region, stages, targets, kinds, loop), loop, form).text()


class _Writer:
    """Writes the kernel around an element function."""

    def __init__(self, element: Element, loop: Loop, form: Form) -> None:
        self.element, self.loop, self.form = element, loop, form
        self.reductions = element.reductions

    def text(self) -> str:
        """The whole source."""
        parts = ['#include "scalar.cuh"']
        if self.reductions:
            parts.append('#include "reduce.cuh"')
        if self.element.drawn:
            parts.append('#include "drawn.cuh"')
        index = "long long" if self.loop.wide else "int"
        return "\n".join([*parts, f"typedef {index} tg_index;", "", self.element.text(), "", self._kernel(), ""])

    def _kernel(self) -> str:
        params = [f"{kind} {name}" for kind, name in self._params()]
        if self.form.split:
            params += [f"{cuda_types.compute(r.wide)}* __restrict__ part{i}" for i, r in enumerate(self.reductions)]
            params.append("tg_uint64* __restrict__ arrived")
        params += [f"{kind} {name}" for kind, name in self.element.result_params()]
        if self.reductions:
            params += ["const tg_index kept", "const tg_index reduced", "const tg_index chunk"]
            params += [f"const tg_index g{d}" for d in range(1, len(self.loop.kept))]
            params += [f"const tg_index u{d}" for d in range(len(self.loop.kept))]
            params += [f"const tg_index h{d}" for d in range(1, len(self.loop.reduced))]
            params += [f"const tg_index w{d}" for d in range(len(self.loop.reduced))]
        else:
            params.append("const tg_index size")
        body = {None: self._flat, ROW: self._rows, COLUMN: self._columns}[self.form.walk]()
        body = self._keys() + body + (self._joining() if self.form.split else [])
        head = 'extern "C" __global__ void __launch_bounds__(256) tg_fused('
        return "\n".join([head, "    " + ",\n    ".join(params) + ") {", *(f"    {line}" for line in body), "}"])

    def _params(self) -> list[tuple[str, str]]:
        """What the kernel takes for its elements: keys by value, or where they lie, and how far it is from there."""
        params = self.element.params()
        if not self.form.held:
            return params
        changed: list[tuple[str, str]] = []
        for kind, name in params:
            if kind != KEY:
                changed.append((kind, name))
            elif name.startswith("lo"):
                changed += [("const tg_uint64* __restrict__", f"key{name[2:]}"), (KEY, f"far{name[2:]}")]
        return changed

    def _keys(self) -> list[str]:
        """Statements that fetch keys which lie in memory."""
        if not self.form.held:
            return []
        lines = []
        for i in range(len(self.element.drawn)):
            lines += [f"const tg_uint64 {part}{i} = key{i}[{k}];" for k, part in enumerate(("lo", "hi"))]
            lines.append(f"const tg_uint64 at{i} = key{i}[2] + far{i};")
        return lines

    def _call(self, count: Any, lanes: Any, index: str) -> str:
        names = [name for _, name in self.element.params()] + [f"word{i}" for i in self.element.tiled]
        if self.element.sharing > 1:
            names += [f"d{i}" for i in range(len(self.element.drawn))]
        sums = [f"t{i}" for i in range(len(self.reductions))]
        template = f"<{count}, {lanes}>" if sums else f"<{count}>"
        return f"tg_element{template}({', '.join([index, *names, *sums])});"

    def _tiles(self) -> list[str]:
        """A block walks tiles of 4096 elements word by word, so that a thread uses every bit of what it draws."""
        draws = [f"const tg_bits16_tile d{i}(lo{i}, hi{i}, at{i}, first);" for i in self.element.tiled]
        words = [f"const tg_uint64 word{i} = d{i}.block.at[w];" for i in self.element.tiled]
        return [
            "for (tg_index tile = blockIdx.x; tile * 4096 < size; tile += gridDim.x) {",
            "    const tg_index first = tile * 4096 + threadIdx.x * 4;",
            *(f"    {line}" for line in draws),
            "#pragma unroll",
            "    for (int w = 0; w < 4; ++w) {",
            "        const tg_index i = first + w * 1024;",
            *(f"        {line}" for line in words),
            f"        if (i + 4 <= size) {self._call(4, 1, 'i')}",
            f"        else for (tg_index e = i; e < size; ++e) {self._call(1, 1, 'e')}",
            "    }",
            "}",
        ]

    def _groups(self) -> list[str]:
        """A thread walks the packs beside each other that one block of uniform numbers serves."""
        vec = self.loop.vec
        per = vec * self.element.sharing
        blocks = [
            f"const {self.element.block(i)} d{i}(lo{i}, hi{i}, at{i}, g * {per});"
            for i in range(len(self.element.drawn))
        ]
        return [
            f"const tg_index groups = size / {per} + (size % {per} != 0), step = tg_index(gridDim.x) * 256;",
            "for (tg_index g = tg_index(blockIdx.x) * 256 + threadIdx.x; g < groups; g += step) {",
            *(f"    {line}" for line in blocks),
            "#pragma unroll",
            f"    for (int h = 0; h < {self.element.sharing}; ++h) {{",
            f"        const tg_index i = g * {per} + h * {vec};",
            f"        if (i + {vec} <= size) {self._call(vec, 1, 'i')}",
            f"        else for (tg_index e = i; e < size; ++e) {self._call(1, 1, 'e')}",
            "    }",
            "}",
        ]

    def _flat(self) -> list[str]:
        if self.form.tiled:
            return self._tiles()
        if self.element.sharing > 1:
            return self._groups()
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
            wide = cuda_types.compute(r.wide)
            fill = ", ".join([f"tg_{r.ufunc}<{wide}>::identity()"] * lanes)
            lines.append(f"{wide} t{i}[{lanes}] = {{{fill}}};")
        return lines

    def _rows(self) -> list[str]:
        """Some lanes or a block add up a row: thread t takes packs t, t + lanes, ... of four, whatever is loaded."""
        lanes = self.form.lanes
        vec, rank = self.loop.vec, len(self.loop.reduced)
        lines = [
            f"const int lane = threadIdx.x % {lanes};",
            f"const tg_index k = tg_index(blockIdx.x) * {256 // lanes} + threadIdx.x / {lanes};",
            "const tg_index from = tg_index(blockIdx.y) * chunk;",
            "const tg_index end = from + chunk < reduced ? from + chunk : reduced;",
            "const tg_index to = k < kept ? end : from;  // nobody leaves early: lanes of a warp join",
            *self._offset("base", "k", "g", "u", len(self.loop.kept)),
            *self._totals(1),
        ]
        head = f"for (tg_index r = from + lane * 4; r < to; r += {lanes} * 4) {{"
        if vec == 4:
            lines += ["#pragma unroll 4", head]
            lines += [f"    {line}" for line in self._offset("step", "r", "h", "w", rank)]
            lines.append(f"    {self._call(4, 1, 'base + step')}")
        else:
            lines += [head, "    for (tg_index e = r; e < r + 4 && e < to; ++e) {"]
            lines += [f"        {line}" for line in self._offset("step", "e", "h", "w", rank)]
            lines += [f"        {self._call(1, 1, 'base + step')}", "    }"]
        lines.append("}")
        for i, r in enumerate(self.reductions):
            wide = cuda_types.compute(r.wide)
            op = f"tg_{r.ufunc}<{wide}>"
            if lanes <= 32:
                lines.append(f"const {wide} z{i} = tg_warp_reduce<{op}, {lanes}>(t{i}[0]);")
            else:
                lines.append(f"__shared__ {wide} m{i}[8];")
                lines.append(f"const {wide} z{i} = tg_block_reduce<{op}, 256>(t{i}[0], m{i});")
        out = self._out("k * gridDim.y + blockIdx.y", "k")
        return [*lines, "if (lane == 0 && k < kept) {", *(f"    {line}" for line in out), "}"]

    def _out(self, part: str, index: str) -> list[str]:
        """The totals ``z0``, ... to their place: as parts to be joined, or on to the results."""
        if self.form.split:
            return [f"part{i}[{part}] = z{i};" for i in range(len(self.reductions))]
        return self.element.delivered(index)

    def _columns(self) -> list[str]:
        """Lanes beside each other, each of ``vec`` columns; walkers take every so manieth row, then join in order."""
        vec, lanes, walkers = self.loop.vec, self.form.lanes, 256 // self.form.lanes
        lines = [
            f"const int lane = threadIdx.x % {lanes}, walker = threadIdx.x / {lanes};",
            f"const tg_index k = (tg_index(blockIdx.x) * {lanes} + lane) * {vec};",
            "const tg_index from = tg_index(blockIdx.y) * chunk;",
            "const tg_index to = from + chunk < reduced ? from + chunk : reduced;",
            *self._totals(vec),
            "if (k < kept) {",
            *(f"    {line}" for line in self._offset("base", "k", "g", "u", len(self.loop.kept))),
            f"    for (tg_index r = from + walker; r < to; r += {walkers}) {{",
            *(f"        {line}" for line in self._offset("step", "r", "h", "w", len(self.loop.reduced))),
            f"        {self._call(vec, vec, 'base + step')}",
            "    }",
            "}",
        ]
        for i, r in enumerate(self.reductions):
            wide = cuda_types.compute(r.wide)
            lines += [
                f"__shared__ {wide} m{i}[{walkers}][{lanes}];",
                f"{wide} s{i}[{vec}];",
                "#pragma unroll",
                f"for (int j = 0; j < {vec}; ++j) {{",
                f"    m{i}[walker][lane] = t{i}[j];",
                "    __syncthreads();",
                "    if (walker == 0) {",
                f"        s{i}[j] = m{i}[0][lane];",
                f"        for (int w = 1; w < {walkers}; ++w)",
                f"            s{i}[j] = tg_{r.ufunc}<{wide}>::join(s{i}[j], m{i}[w][lane]);",
                "    }",
                "    __syncthreads();",
                "}",
            ]
        lines += ["if (walker == 0 && k < kept) {", "#pragma unroll", f"    for (int j = 0; j < {vec}; ++j) {{"]
        lines += [f"        const {cuda_types.compute(r.wide)} z{i} = s{i}[j];" for i, r in enumerate(self.reductions)]
        lines += [f"        {line}" for line in self._out("blockIdx.y * kept + k + j", "k + j")]
        return [*lines, "    }", "}"]

    def _joining(self) -> list[str]:
        """The last block of those that have parts of the same results joins them, in order.

        Parts lie result by result where rows were reduced, else part by part.  A warp joins those of a result; where
        many columns lie beside each other, a thread.
        """
        columns, by_thread = self.form.walk == COLUMN, self.form.walk == COLUMN and self.form.lanes == 32
        beside = self.form.lanes * self.loop.vec if columns else 256 // self.form.lanes
        first, step, lanes = ("threadIdx.x", 256, 1) if by_thread else ("threadIdx.x / 32", 8, 32)
        lines = [
            "if (!tg_is_last_block(arrived + blockIdx.x, gridDim.y)) return;",
            f"for (int r = {first}; r < {beside}; r += {step}) {{",
            f"    const tg_index k = tg_index(blockIdx.x) * {beside} + r;",
            "    if (k >= kept) break;",
        ]
        for i, r in enumerate(self.reductions):
            wide, op = cuda_types.compute(r.wide), f"tg_{r.ufunc}<{cuda_types.compute(r.wide)}>"
            place = "c * kept + k" if columns else "k * gridDim.y + c"
            start = "0" if by_thread else "threadIdx.x % 32"
            lines += [
                f"    {wide} j{i} = {op}::identity();",
                f"    for (tg_index c = {start}; c < gridDim.y; c += {lanes})",
                f"        j{i} = {op}::join(j{i}, part{i}[{place}]);",
                f"    const {wide} z{i} = {f'j{i}' if by_thread else f'tg_warp_reduce<{op}>(j{i})'};",
            ]
        deliver = self.element.delivered("k")
        if not by_thread:
            deliver = ["if (threadIdx.x % 32 == 0) {", *(f"    {line}" for line in deliver), "}"]
        return [*lines, *(f"    {line}" for line in deliver), "}"]
