"""Collectives in a run: of a program alone, which sends nothing, but enters them all; who is told of them."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed.watching import WATCHING
from tapegrad.profile.recorder import Session, collectives
from tapegrad.tracing.communication import collectives as collectives_of
from tapegrad.tracing.communication import walks as walks_of
from tapegrad.tracing.run import Run
from tests.tracing.reading import reread

META: dict[str, Any] = {
    "tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"},
    "outcome": {"kind": "finished", "code": 0},
}  # fmt: skip


def recorded(program: Any, **options: Any) -> Run:
    session = Session(**options)
    session.start()
    try:
        program()
    finally:
        session.stop()
    return session.run(META)


def variables() -> list[tg.Variable]:
    return [tg.Variable(np.ones(1000, np.float32), name=f"v{i}") for i in range(3)]


def step(vs: list[tg.Variable], **options: Any) -> None:
    with dist.GradientTape(**options) as tape:
        loss = sum(tg.sum(v * v) for v in vs)
    tape.gradient(loss, vs)


def test_a_collective_alone_has_its_bytes_its_line_and_its_times() -> None:
    x = tg.asarray(np.ones((100, 10), np.float32))
    (event,) = collectives_of(recorded(lambda: dist.all_reduce(x)))
    assert (event.rank, event.group, event.ranks, event.kind, event.bytes) == (0, "world", 1, "all_reduce", 4000)
    assert event.detail.startswith("float32 (100, 10)")
    assert event.file == __file__ and "dist.all_reduce(x)" in linecache.getline(event.file, event.line)
    assert 0 <= event.entered <= event.begun <= event.done
    assert not event.under_way and event.walk == -1
    assert event.begun <= event.needed <= event.done and 0 < event.waited <= event.done - event.entered
    assert event.others == 0 and event.transfer == event.done - event.entered


def test_each_bucket_is_an_event_under_way_of_the_walk_in_which_it_started() -> None:
    vs = variables()
    run = recorded(lambda: [step(vs, bucket_bytes=4000) for _ in range(2)])
    walks, events = walks_of(run), collectives_of(run)
    sums = [e for e in events if e.kind == "all_reduce"]
    assert len(walks) == 2 and [e.walk for e in sums] == [0] * 3 + [1] * 3
    assert all(e.under_way and e.bytes == 4000 for e in sums)
    for e in sums:
        assert walks[e.walk].begin <= e.entered <= e.done <= walks[e.walk].end
    for walk in (sums[:3], sums[3:]):  # the walk goes on until all have begun, then waits for one after the other
        assert walk[-1].begun < walk[0].needed < walk[1].needed < walk[2].needed < walks[walk[0].walk].end
    assert walks[0].end <= walks[1].begin
    numbers = [e.number for e in events]
    assert numbers == sorted(set(numbers))


def test_a_walk_of_a_plain_tape_is_noted_but_those_of_reruns_are_not() -> None:
    v = variables()[0]
    block = tg.recompute_grad(lambda: tg.tanh(v) * v)

    def program() -> None:
        with tg.GradientTape() as tape:
            loss = tg.sum(block())
        tape.gradient(loss, v)

    run = recorded(program)
    assert len(walks_of(run)) == 1 and not collectives_of(run)


def test_what_is_sent_to_oneself_is_received_by_name() -> None:
    def program() -> None:
        dist.send(tg.asarray(np.ones(3)), 0)
        dist.recv((3,), 0, "float64")

    sent, received = collectives_of(recorded(program))
    assert (sent.kind, received.kind) == ("send", "recv") and sent.bytes == received.bytes == 24
    assert (sent.group, sent.number) == (received.group, received.number) == ("0-0", sent.number)


def test_nobody_is_told_before_a_recording_and_after_it() -> None:
    session = Session()
    x = tg.asarray(np.ones(3))
    dist.all_reduce(x)
    session.start()
    assert WATCHING.now is session.collectives
    session.stop()
    assert WATCHING.now is WATCHING.nobody
    dist.all_reduce(x)
    assert not session.run(META).count("communication")


def test_steps_that_are_not_recorded_have_no_collectives() -> None:
    def program() -> None:
        for _ in range(5):
            dist.all_reduce(tg.asarray(np.ones(3)))
            tg.memory.step()

    assert len(collectives_of(recorded(program, warmup=1, steps=2))) == 2


def test_when_there_are_too_many_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MOST", 3)
    session = Session()
    session.start()
    for _ in range(5):
        dist.all_reduce(tg.asarray(np.ones(3)))
    session.stop()
    run = session.run(META)
    assert run.count("communication") == 3 and run.meta["collectives_left_out"] == 2


def test_they_are_saved_and_loaded() -> None:
    run = recorded(lambda: step(variables()))
    again = reread(run)
    assert collectives_of(again) == collectives_of(run) != []
    assert walks_of(again) == walks_of(run) != []
