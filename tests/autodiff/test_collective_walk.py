"""Which targets a process seeds, and of which it warns, where several processes take part in operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, same, values
from peers import Peers, of_all

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.errors import ReplicatedTargetWarning
from tapegrad.ops.apply import barrier

OWN, ALL, INSIDE, DOUBTFUL = "its own", "one of all", "one of all, from a call", "of both kinds"
Operation = Callable[[Any], Any]
TARGETS: dict[str, tuple[str, Callable[[Operation, Any, Any, Any], Any]]] = {
    "a value of its own": (OWN, lambda everyone, x, own, number: x * own),
    "of a number": (OWN, lambda everyone, x, own, number: number * 3.0),
    "what all have": (ALL, lambda everyone, x, own, number: everyone(x)),
    "made of that": (ALL, lambda everyone, x, own, number: everyone(x) * 2.0),
    "made of two such": (ALL, lambda everyone, x, own, number: everyone(x) * everyone(own)),
    "made of that and of a number": (ALL, lambda everyone, x, own, number: everyone(x) * number),
    "made of that and of its own": (DOUBTFUL, lambda everyone, x, own, number: everyone(x) * own),
    "made of what is in doubt": (DOUBTFUL, lambda everyone, x, own, number: everyone(x) * own * 2.0),
    "of a call": (INSIDE, lambda everyone, x, own, number: tg.recompute_grad(everyone)(x)),
    "made of a call's": (INSIDE, lambda everyone, x, own, number: tg.recompute_grad(everyone)(x) + 1.0),
    "made of a call's and of its own": (INSIDE, lambda everyone, x, own, number: tg.recompute_grad(everyone)(x) * own),
    "of a call without such an operation": (OWN, lambda everyone, x, own, number: tg.recompute_grad(tg.sin)(x)),
}


class Otherwise(Peers):
    """The other processes' targets have other bits."""

    def told(self, group: str, mine: Any) -> list[Any]:
        return [mine, *[(*mine[:5], [b"other"] * len(mine[5]))] * (self.count - 1)]


@pytest.mark.parametrize("what", TARGETS)
@pytest.mark.parametrize("peers", [Peers(2, False), Peers(2, True), Peers(1, True), Otherwise(2, False)])
def test_a_process_seeds_what_is_its_own_and_the_first_one_what_all_have(
    what: str, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In doubt each seeds and is warned; where the others' bits differ a target is each one's own."""
    kind, make = TARGETS[what]
    everyone, x, own, number = of_all(peers, monkeypatch), c64([1.0, 2.0]), c64([3.0, 4.0]), c64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([x, own, number])
        everyone(own)
        y = make(everyone, x, own, number)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gradients = values(tape.gradient(y, [x, own, number], unconnected_gradients="zero"))
    alike = peers.count > 1 and not isinstance(peers, Otherwise)
    seeds = peers.foremost or kind in (OWN, DOUBTFUL) or not alike
    assert any(np.any(g) for g in gradients) == seeds
    warned = ["from a call" if kind == INSIDE else "of others"] if alike and kind in (INSIDE, DOUBTFUL) else []
    assert [w.category for w in found] == [ReplicatedTargetWarning] * len(warned)
    assert all(text in str(w.message) for text, w in zip(warned, found, strict=True))


@pytest.mark.parametrize("foremost", [True, False])
def test_a_target_that_all_have_may_be_older_than_the_tape(foremost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, x = of_all(Peers(2, foremost), monkeypatch), c64([1.0, 2.0])
    y, mine = everyone(x), x * 2.0
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([y, mine])
        everyone(y)
    same(tape.gradient(y, y), [1.0, 1.0] if foremost else [0.0, 0.0])
    same(tape.gradient(mine, mine), [1.0, 1.0])


@pytest.mark.parametrize("foremost", [True, False])
def test_where_another_process_seeds_the_target_gradients_are_zeros_not_none(
    foremost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a program that sums its gradients over processes would have numbers to add on some of them only."""
    everyone, x, unused = of_all(Peers(2, foremost), monkeypatch), c64([1.0, 2.0]), c64([0.0])
    scale = tg.Variable(np.float64(3.0))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([x, unused])
        total = everyone(x)
        tenfold = total * 10.0
        y = tenfold * scale
        late = y * 2.0
    sources, seeds = [x, total, tenfold, scale, y, unused, late], 1.0 if foremost else 0.0
    wanted = [[30.0] * 2, [30.0] * 2, [3.0] * 2, 30.0, [1.0] * 2]
    same(tape.gradient(y, sources), [*[np.multiply(w, seeds) for w in wanted], None, None])
    assert all(tape.gradient(y, s).shape == np.shape(w) for s, w in zip(sources, wanted, strict=False))


def test_all_operands_of_an_operation_of_several_processes_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere each may be: so the rule of the second runs, too, where the tape watches the first alone."""
    tg.zeros(1)  # every operation is declared
    asked: list[int] = []

    def rule(i: int) -> Callable[..., Any]:
        return lambda ct: asked.append(i) or ct

    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    both = primitive.general(
        "both", impl=lambda xp, x, y: x + y, infer=lambda x, y: x, vjp=[rule(0), rule(1)], effect=Peers(2),
        dry=lambda x, y, out: out,
    )  # fmt: skip
    x, y = c64([1.0, 2.0]), c64([3.0, 4.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        z = barrier(both, x, y)
    same(tape.gradient(z, x), [1.0, 1.0])
    assert 0 in asked
