"""The least work that any plan of a captured step repeats within so many bytes: a lower bound, by linear programming.

Look at the moment before one step: all that it depends on has been done, and nothing that depends on it.  What is read
from then on is alive at that moment, or is made after it; what is made from its ancestors after that moment is made
again.  So each value is kept (bytes) or its maker is repeated (work), for which what the maker reads must be kept or
recomputed, too.  Parts of a value may be kept here, and what the repetition needs beside the rest is not counted: no
plan, whatever its order, repeats less.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

MIB = 2**20
_MOMENTS = 8
"""Steps at which most bytes are alive that are looked at."""


def least_extra(graph: Any, limit: int) -> float:
    """Work repeated at least where values take ``limit`` bytes, over the work of all steps; ``inf``: no room at all."""
    live = graph.account(range(len(graph.reads))).live
    moments = sorted(range(len(live)), key=lambda i: (-live[i], i))[:_MOMENTS]
    return max(_at(graph, limit, moment) for moment in moments)


def _at(graph: Any, limit: int, moment: int) -> float:
    """The bound of the moment before the step of this number."""
    before, after = _ancestors(graph, moment), _descendants(graph, moment)
    values = [s for s, p in enumerate(graph.producers) if p not in after]
    steps = [i for i in range(len(graph.reads)) if i not in after and (graph.repeatable(i) or i not in before)]
    kept = {s: k for k, s in enumerate(values)}
    made = {i: len(values) + k for k, i in enumerate(steps)}
    cost = [0.0] * len(values) + [graph.costs[i] if i in before else 0.0 for i in steps]
    there = lambda s: [(column, -1.0) for column in (kept[s], made.get(graph.producers[s])) if column is not None]
    rows: list[tuple[list[tuple[int, float]], float]] = []  # the sum of the terms is at most the number
    read = {s for i in after for s in graph.reads[i] if s in kept}
    rows += [(there(s), -1.0) for s in sorted(read | {s for s in graph.finals if s in kept})]
    rows += [([(made[i], 1.0), *there(s)], 0.0) for i in steps for s in graph.reads[i]]
    own = sum(graph.sizes[s] for s in graph.writes[moment]) + graph.temporaries[moment]
    own -= max((graph.sizes[s] for s in graph.replaced[moment]), default=0)
    rows.append(([(kept[s], graph.sizes[s] / MIB) for s in values], (limit - own) / MIB))
    least = np.zeros(len(cost))
    least[[kept[s] for s in graph.reads[moment]]] = 1.0
    terms = [(r, column, x) for r, (row, _) in enumerate(rows) for column, x in row]
    r, c, x = (np.array(column) for column in zip(*terms, strict=True))
    matrix = coo_matrix((x, (r, c)), shape=(len(rows), len(cost))).tocsr()
    scaled = np.array(cost) / graph.total_cost
    answer = linprog(scaled, matrix, [b for _, b in rows], bounds=np.stack([least, np.ones(len(cost))], axis=1))
    return float(answer.fun) if answer.status == 0 else inf


def _ancestors(graph: Any, step: int) -> set[int]:
    found: set[int] = set()
    todo = [step]
    while todo:
        makers = {graph.producers[s] for s in graph.reads[todo.pop()]} - found - {-1}
        found |= makers
        todo += makers
    return found


def _descendants(graph: Any, step: int) -> set[int]:
    """The step itself, too."""
    found = {step}
    for i in range(step + 1, len(graph.reads)):
        if any(graph.producers[s] in found for s in graph.reads[i]):
            found.add(i)
    return found
