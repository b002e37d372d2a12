"""``Layer.summary``: a table of what a model is made of."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tapegrad import nest
from tapegrad.sizes import format_bytes

_HEAD = ("layer", "output shape", "parameters", "bytes", "dtype")


@dataclass(frozen=True)
class Row:
    """One layer: its path in the model and class, what it gave, and the variables that no row before it has."""

    path: str
    kind: str
    depth: int
    output: Any
    """A shape, or the same structure as the output with shapes in it; None where nothing was computed."""
    parameters: int
    trainable: int
    nbytes: int
    dtypes: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """As text, one for each column."""
        name = "  " * self.depth + (f"{self.path} ({self.kind})" if self.path else self.kind)
        output = "" if self.output is None else str(self.output)
        if not self.dtypes:
            return name, output, "", "", ""
        return name, output, f"{self.parameters:,}", format_bytes(self.nbytes), ", ".join(self.dtypes)


@dataclass(frozen=True)
class Summary:
    """The rows of a model, the model's own first; as text a table, in a notebook one of HTML."""

    name: str
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the variables hold, each variable counted once."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """How many of them are trained."""
        return sum(row.trainable for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the variables."""
        return sum(row.nbytes for row in self.rows)

    def _total(self) -> str:
        fixed = self.parameters - self.trainable
        return (
            f"{self.parameters:,} parameters ({format_bytes(self.nbytes)}): "
            f"{self.trainable:,} are trained, {fixed:,} are not"
        )

    def __str__(self) -> str:
        table = [_HEAD, *(row.cells() for row in self.rows)]
        kept = [i for i in range(len(_HEAD)) if any(cells[i] for cells in table[1:])]
        widths = {i: max(len(cells[i]) for cells in table) for i in kept}
        lines = []
        for cells in table:
            told = (cells[i].rjust(widths[i]) if i in (2, 3) else cells[i].ljust(widths[i]) for i in kept)
            lines.append("  ".join(told).rstrip())
        rule = "-" * max(map(len, lines))
        return "\n".join([self.name, rule, lines[0], rule, *lines[1:], rule, self._total()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = lambda tag, text: f"<{tag} style='text-align:left;white-space:pre'>{html.escape(text)}</{tag}>"
        lines = ["".join(cell("th", text) for text in _HEAD)]
        lines += ["".join(cell("td", text) for text in row.cells()) for row in self.rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<b>{html.escape(self.name)}</b><table>{body}</table>{html.escape(self._total())}"


def summary(name: str, layers: list[tuple[str, int, Any]], run: Callable[[], object] | None) -> Summary:
    """The table of layers given with path and depth; ``run`` calls the first of them, so that outputs are known."""
    outputs: dict[int, Any] = {}
    if run is not None:
        with _watched([layer for _, _, layer in layers], outputs):
            run()
    trained = set(map(id, layers[0][2].trainable_variables))
    counted: set[int] = set()
    rows = []
    for path, depth, layer in layers:
        own = [v for v in layer.own_variables() if id(v) not in counted]
        counted.update(map(id, own))
        sizes = sum(v.size for v in own), sum(v.size for v in own if id(v) in trained), sum(v.nbytes for v in own)
        dtypes = tuple(dict.fromkeys(str(v.dtype) for v in own))
        rows.append(Row(path, type(layer).__name__, depth, outputs.get(id(layer)), *sizes, dtypes))
    return Summary(name, tuple(rows))


@contextmanager
def _watched(layers: list[Any], outputs: dict[int, Any]) -> Iterator[None]:
    """While in the block, each call of a layer notes the shapes that it gives, by the layer's identity."""
    try:
        for layer in layers:
            vars(layer)["call"] = _noting(layer.call, outputs, id(layer))
        yield
    finally:
        for layer in layers:
            vars(layer).pop("call", None)


def _noting(call: Callable[..., Any], outputs: dict[int, Any], key: int) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        outputs[key] = nest.map_leaves(lambda x: getattr(x, "shape", None), output)
        return output

    return noted
