"""The step that is read from a run: which one, what it computes, and when its collectives are needed."""

from __future__ import annotations

import pytest

from tapegrad.profile.plan.ranks.recorded import CommunicationError, step_of
from tests.profile.made_runs import MIB, Builder
from tests.profile.plan.made import training as without_communication
from tests.profile.plan.ranks.communicating import steps, training


def test_moments_count_from_the_step() -> None:
    found = step_of(training())
    step = found.step
    assert (step.computation, found.ns, found.ranks) == (pytest.approx(0.010), 10_000_000, 1)
    first, second, loss = step.collectives
    assert (first.ready, first.wanted, first.nbytes) == (pytest.approx(0.005), pytest.approx(0.008), MIB)
    assert (second.ready, second.wanted, second.nbytes) == (pytest.approx(0.007), pytest.approx(0.008), 4 * MIB)
    assert loss.ready == loss.wanted == pytest.approx(0.009)
    assert first.walk == second.walk >= 0 > loss.walk and first.common == second.common
    assert (loss.kind, loss.file, loss.line, loss.exact) == ("all_reduce", "model.py", 14, True)


def test_what_nobody_waits_for_is_needed_when_it_was_done() -> None:
    run = training()
    run.communication["needed_ns"] = [-1] * run.count("communication")
    assert [c.wanted for c in step_of(run).step.collectives] == pytest.approx([0.00501, 0.00701, 0.009])


def test_the_order_of_rows_does_not_matter() -> None:
    run = training()
    for values in run.communication.values():
        values.reverse()
    assert step_of(run) == step_of(training())


def test_waiting_is_no_computation() -> None:
    """Two ranks: 1 ms for a blocking sum, and 3 ms for a bucket that is under way."""

    def fill(b: Builder, number: int, begin: int) -> None:
        walk = b.walk(begin + 2000, begin + 9000)
        for rank in (0, 1):  # rank 1's are not asked
            b.collective("all_gather", begin + 1000, begin + 2000, 1000 + rank, rank=rank, ranks=2, number=2 * number)
            b.collective("all_reduce", begin + 4000, begin + 7900, 3000, needed=begin + 5000, under_way=True, walk=walk,
                         rank=rank, ranks=2, number=2 * number + 1)  # fmt: skip
        b.collective("all_reduce", begin + 9000, begin + 9000, ranks=2, number=99)

    run = steps(4, fill)
    found = step_of(run)
    step = found.step
    assert (step.computation, found.ns, found.ranks) == (pytest.approx(0.006), 10_000_000, 2)
    assert [(c.ready, c.wanted) for c in step.collectives] == [
        pytest.approx(pair) for pair in ((0.001, 0.001), (0.003, 0.004), (0.005, 0.005))
    ]  # fmt: skip

    run.meta["rank"] = 1  # whose steps they are
    assert step_of(run).step.computation == pytest.approx(0.006 - 0.000001)
    run.meta["rank"] = "two"
    with pytest.raises(CommunicationError):
        step_of(run)


def test_the_step_is_the_middle_one_of_those_that_are_set_up_and_communicate() -> None:
    waits = {0: 9000, 1: 8000, 2: 4000, 3: 2000, 4: 3000}

    def fill(b: Builder, number: int, begin: int) -> None:
        if number in waits:
            b.collective("barrier", begin + 100, begin + 100 + waits[number], nbytes=0, number=number)

    assert step_of(steps(7, fill)).step.computation == pytest.approx(0.007)
    assert step_of(steps(2, fill)).step.computation == pytest.approx(0.002)
    assert step_of(steps(1, fill)).step.computation == pytest.approx(0.001)


def test_bytes_are_those_that_each_rank_has_whatever_the_number_of_ranks() -> None:
    def fill(b: Builder, number: int, begin: int) -> None:
        for i, (kind, mine, others) in enumerate((
            ("scatter", 0, 8 * MIB), ("gather_pieces", 2 * MIB, MIB), ("all_gather", MIB, MIB), ("send", MIB, 0),
        )):  # fmt: skip
            for rank, nbytes in enumerate((mine, others)):
                b.collective(kind, begin + i, begin + i, rank=rank, ranks=4, number=4 * number + i, nbytes=nbytes)

    assert [(c.kind, c.nbytes) for c in step_of(steps(3, fill)).step.collectives] == [
        ("scatter", 2 * MIB), ("gather_pieces", 8 * MIB), ("all_gather", MIB)
    ]  # fmt: skip


def test_details_say_what_is_alike() -> None:
    details = ["float32 (3,) on a GPU, exact=True", "float32 (4, 5) on a GPU, exact=True", "float32 (3,), exact=False"]

    def fill(b: Builder, number: int, begin: int) -> None:
        for i, detail in enumerate(details):
            row = b.collective("all_reduce", begin + i, begin + i, number=3 * number + i)
            b.run.communication["detail"][row] = b.text(detail)

    one, two, three = step_of(steps(3, fill)).step.collectives
    assert one.common == two.common != three.common and (one.exact, three.exact) == (True, False)


def test_a_run_without_communication_says_what_to_do() -> None:
    with pytest.raises(CommunicationError, match="has no communication: record .*GradientTape.*one process is enough"):
        step_of(without_communication())

    def fill(b: Builder, number: int, begin: int) -> None:
        b.collective("broadcast", 10**9, 10**9 + 1)

    with pytest.raises(CommunicationError, match="no complete step of the run communicates: record three steps"):
        step_of(steps(3, fill))
    run = training()
    run.communication["done_ns"] = [-1] * run.count("communication")  # they were entered, and nothing came of it
    with pytest.raises(CommunicationError, match="has no communication"):
        step_of(run)
