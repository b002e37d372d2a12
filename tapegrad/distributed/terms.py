"""Terms of an objective: what every rank adds the same way counts once for each of them.

The objective is the sum of the ranks' targets.  So a regularizer of variables, which all ranks have the same way,
counts as often as there are ranks, unless it is wrapped in ``once``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tapegrad.autodiff.records import Applied, Record
from tapegrad.core.node import LEAF, Node
from tapegrad.errors import ReplicatedTargetWarning, warn

_SUMS = frozenset({"add", "subtract"})
_SCALED = frozenset({"multiply", "divide", "negative", "identity"})
Names = frozenset[str]


def warn_of_repeated_terms(
    records: Sequence[Record], targets: Iterable[int], names: Mapping[int, str], ranks: int
) -> None:
    """Warn of a term, a number, that depends on variables alone, where others depend on a rank's own values.

    ``targets``: indices of values; ``names`` of variables, by the indices of their values.
    """
    terms = _terms(records, targets, names)
    if len(terms) < 2:
        return
    known = _dependences(records, names)
    kinds = [known[n.index] for n in terms]
    repeated = [kind for n, kind in zip(terms, kinds, strict=True) if kind and not n.aval.ndim]
    if repeated and None in kinds:
        who = ", ".join(repr(name) for name in sorted(repeated[0]))
        warn(
            f"gradient: a term of the target depends on variables alone ({who}), which all ranks have, others on this "
            f"rank's values; in the sum over ranks that term counts {ranks} times: wrap it in tg.distributed.once(...)"
            ", or let each rank's target be a mean over its examples, and give the tape average=True",
            ReplicatedTargetWarning,
        )


def _terms(records: Sequence[Record], targets: Iterable[int], names: Mapping[int, str]) -> list[Node]:
    """The values, each from another operation, that targets are sums of, up to signs and factors."""
    made = {n.index for record in records for n in record.results}
    wanted, terms = set(targets), []
    for record in reversed(records):
        results = [n for n in record.results if n.index in wanted]
        if not results:
            continue
        if isinstance(record, Applied) and _is_sum(record.node.prim.name, record.inputs, names):
            wanted.update(n.index for n in record.inputs if n.index in made)
        else:
            terms += results
    return terms


def _is_sum(name: str, inputs: Sequence[Node], names: Mapping[int, str]) -> bool:
    """Whether a value is the sum of its inputs, or one of them with a factor or another sign."""
    others = [n for n in inputs if not (_is_number(n) and n.index not in names)]
    return name in _SUMS or (name in _SCALED and len(others) < 2 and (name != "divide" or inputs[0] in others))


def _is_number(node: Node) -> bool:
    return node.prim is LEAF and not node.aval.ndim


def _dependences(records: Sequence[Record], names: Mapping[int, str]) -> dict[int, Names | None]:
    """For each value the names of the variables that it depends on; None: on what other ranks have otherwise, too."""
    known: dict[int, Names | None] = {i: frozenset((name,)) for i, name in names.items()}
    for record in records:
        if not isinstance(record, Applied) or record.node.prim.effect is not None or _is_once(record):
            result = None
        else:
            inputs = [known.get(n.index, None if n.aval.ndim else frozenset()) for n in record.inputs]
            result = None if None in inputs else frozenset[str]().union(*(i for i in inputs if i is not None))
        for n in record.results:
            known[n.index] = result
    return known


def _is_once(record: Applied) -> bool:
    """Whether a value is there on some ranks only (see ``once``)."""
    return record.node.prim.name == "where" and _is_number(record.inputs[0])
