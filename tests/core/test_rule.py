"""Rules are given what their parameters' names ask for."""

from __future__ import annotations

from typing import Any

from tapegrad.core.rule import OUT, Rule

AVALS: Any = ["aval x", "aval y", "aval z", "aval out"]


def test_a_rule_is_given_what_it_names() -> None:
    rule = Rule(lambda ct, out, y, x_aval, out_aval, i, xs_aval, *, axis: locals(), ("x", "y", "z"))
    assert rule.slots == rule.slots_of(3) == (OUT, 1) and rule.seeded and rule.constant is None
    given = rule("seed", {OUT: "out", 1: "y"}, AVALS, {"axis": 0, "more": 1}, 2)
    assert given == {
        "ct": "seed", "out": "out", "y": "y", "x_aval": "aval x", "out_aval": "aval out", "i": 2, "axis": 0,
        "xs_aval": AVALS,
    }  # fmt: skip


def test_the_rest_is_all_operands_after_the_first() -> None:
    rule = Rule(lambda out, *rest: (out, rest), ("x",))
    assert rule.slots_of(3) == (OUT, 1, 2) and not rule.seeded
    assert rule(None, {OUT: "out", 1: "y", 2: "z"}, AVALS, {}, 0) == ("out", ("y", "z"))


def test_a_number_is_a_rule_that_reads_nothing() -> None:
    rule = Rule(-1, ("x",))
    assert rule.constant == -1 and rule.slots_of(1) == () and not rule.seeded
