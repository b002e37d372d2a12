"""Writes bench/OPS.md, the coverage table: what it says of an operation is found by running it.

Use: ``PYTHONPATH=tests python -m table.coverage_table``.  ``test_coverage.py`` checks every derivative, and that the
file is current.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import scipy
from table.coverage_case import Case

import tapegrad as tg
from tapegrad.core.node import Node
from tapegrad.core.primitive import Barrier, Drawn, Reduction
from tapegrad.core.state import during

DTYPES = {
    "f2": np.dtype("float16"), "bf": np.dtype(ml_dtypes.bfloat16), "f4": np.dtype("float32"),
    "f8": np.dtype("float64"), "c8": np.dtype("complex64"), "c16": np.dtype("complex128"),
}  # fmt: skip

VERSIONS = f"with NumPy {np.__version__.rpartition('.')[0]}, SciPy {scipy.__version__.rpartition('.')[0]}"
"""What the dtypes may depend on."""

HEAD = """# Operations and their derivatives

Written by `PYTHONPATH=tests python -m table.coverage_table`. `tests/table/test_coverage.py` checks every row against
central differences in float64, forward against reverse mode, and the second order, and that this file is up to date.

* **by**: who differentiates it: H(IPS autograd), P(yTorch), J(AX), C(hainer), as far as their documentation says.
* **VJP, JVP**: the order up to which reverse and forward mode are checked.
* **CUDA**: `fused`: elementwise, part of generated kernels; `view`: no work; else the barriers in it: `own` kernels
  (of products: own calls of cuBLAS), or CuPy's functions.
* **dtypes** that it takes, with a gradient of the operand's dtype: f2 bf f4 f8 c8 c16 (float16 to complex128);
  {versions}.

{count} of {all} operations; left out, with reasons, at the end: {out}.

| operation | tapegrad | tier | by | VJP | JVP | CUDA | dtypes | note |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class _Listing:
    """A recorder of the primitives applied; a guard, too, so that it is told of what no tape is told of."""

    def __init__(self) -> None:
        self.prims: dict[str, Any] = {}

    def record(self, node: Node, inputs: tuple, out: Any) -> None:
        self.prims[node.prim.name] = node.prim

    def record_call(self, call: Any, inputs: tuple, outputs: tuple) -> None:
        pass

    def read(self, variable: Any, value: Any) -> None:
        pass

    def follows(self, buffer: Any) -> bool:
        return False

    def looked_at(self, buffer: Any) -> None:
        pass

    def aliased(self, old: Any, new: Any) -> None:
        pass

    def whole(self, buffer: Any) -> Any:
        return buffer

    def draws(self) -> int:
        return 1


def kernels(found: Case) -> str:
    """How the forward run goes on a GPU."""
    listing = _Listing()
    during(lambda: found.function(*(tg.asarray(x) for x in found.leaves)), recorders=(listing,), batches=(listing,))
    barriers = [p for p in listing.prims.values() if isinstance(p, Barrier) and not isinstance(p, Drawn)]
    if not barriers:
        return "view" if all(p.view for p in listing.prims.values()) else "fused"
    kinds = {"own" if isinstance(p, Reduction) or p.cuda is not None else "CuPy" for p in barriers}
    return " + ".join(sorted(kinds))


def dtypes(found: Case) -> str:
    """The dtypes in which it runs and gives gradients of the same dtype."""
    return " ".join(name for name, dtype in DTYPES.items() if _takes(found, dtype))


def _takes(found: Case, dtype: np.dtype) -> bool:
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            if any(x.dtype.kind == "c" and dtype.kind != "c" for x in found.leaves):
                return False
            leaves = [tg.asarray(x.astype(dtype)) for x in found.leaves]
            y, pull = tg.vjp(found.function, *leaves)
            cts = pull([tg.ones_like(t) for t in y])
    except Exception:
        return False
    return all(g.dtype == dtype for g in cts)


def row(op: str, found: Case, peer: dict[str, str]) -> str:
    """One line of the table."""
    by = "".join(name[0] for name in peer["differentiated by"].split())
    cells = (
        op,
        f"`{found.name}`",
        peer["tier"],
        by,
        found.order,
        found.order,
        kernels(found),
        dtypes(found),
        found.note,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def text(cases: dict[str, Case], left_out: dict[str, str], peers: dict[str, dict[str, str]]) -> str:
    """The whole file."""
    rows = "".join(row(op, cases[op], peer) for op, peer in peers.items() if op in cases)
    reasons = "".join(f"* {op}: {left_out[op]}\n" for op in peers if op in left_out)
    return (
        HEAD.format(count=len(cases), all=len(peers), out=len(left_out), versions=VERSIONS)
        + rows
        + f"\n## Left out\n\n{reasons}"
    )


if __name__ == "__main__":
    from table.registry import CASES, LEFT_OUT, PEERS

    where = Path(__file__).parent.parent.parent / "bench" / "OPS.md"
    where.write_text(text(CASES, LEFT_OUT, PEERS), encoding="utf-8")
    print(f"{where}: {len(CASES)} operations, {len(LEFT_OUT)} left out")
