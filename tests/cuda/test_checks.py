"""Checks of values on a device: nobody waits for them, one record tells of the first, and a look costs nothing."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from shim import standin
from shim.streams import changing

import tapegrad as tg
from tapegrad.errors import IndexingError

pytestmark = pytest.mark.sampled(1 / 2)

N, CLASSES = 6, 4


@pytest.fixture(autouse=True)
def on_cuda(cuda):
    with tg.device(cuda):
        yield


def take(wrong):
    return tg.sum(tg.take(tg.ones((N, 2)), tg.asarray([0, -1, wrong, 2]), axis=0))


def indexed(wrong):
    return tg.sum(tg.ones((N, 2))[tg.asarray([0, wrong])])


def narrow(wrong):
    return tg.sum(tg.take(tg.ones(N), tg.asarray(np.array([1, wrong], "int16"))))


def unsigned(wrong):
    return tg.sum(tg.take(tg.ones(N), tg.asarray(np.array([1, wrong], "uint64"))))


def strided(wrong):
    return tg.sum(tg.take(tg.ones(N), tg.asarray(np.array([[1, 77], [wrong, 77]]))[:, 0]))


def placed(wrong):
    return tg.sum(tg.zeros(N).at[tg.asarray([1, wrong])].add(1.0))


def labelled(wrong):
    return tg.mean(tg.cross_entropy(tg.ones((3, CLASSES)), tg.asarray([0, wrong, wrong])))


def classified(wrong):
    return tg.nn.functional.cross_entropy(tg.ones((3, CLASSES)), tg.asarray([0, wrong, wrong]))


def embedded(wrong):
    return tg.sum(tg.nn.Embedding(N, 2)(tg.asarray([[0, wrong]])))


def stored(wrong):
    return tg.sum(tg.sparse.csr(tg.ones(2), tg.asarray([1, wrong]), tg.asarray([0, 1, 2]), (2, N)) @ tg.ones(N))


def batched(wrong):
    return tg.sum(tg.vmap(lambda i: tg.take(tg.ones(N), i))(tg.asarray([0, 1, wrong])))


WRONG = {
    "take": (take, -7, "take: index -7 is out of range for an axis of length 6"),
    "getitem": (indexed, 6, "index 6 is out of range for an axis of length 6"),
    "int16": (narrow, 300, "take: index 300 is out of range"),
    "uint64": (unsigned, 2**64 - 1, "take: index 9223372036854775807 is out of range"),
    "strided": (strided, 9, "take: index 9 is out of range"),
    "at": (placed, -8, "index -8 is out of range for an axis of length 6"),
    "cross_entropy": (labelled, 4, "cross_entropy: the label of row 1 is out of range for 4 classes"),
    "labels": (classified, 4, r"cross_entropy: wanted labels in \[0, 4\), got 4 among them"),
    "Embedding": (embedded, 6, r"wanted .* in \[0, 6\), got 6 among them"),
    "sparse": (stored, 6, "sparse.csr: column 6 for 6 columns"),
    "vmap": (batched, 6, "take: index 6 is out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_raised_when_a_value_is_read(name, cuda, monkeypatch):
    make, wrong, text = WRONG[name]
    made = make(wrong)
    with pytest.raises(IndexingError, match=text):
        made.item()
    tg.ones(2).numpy()  # told once
    assert np.isfinite(make(1).item())
    monkeypatch.setattr(cuda, "at_once", True)
    with pytest.raises(IndexingError, match=text):
        make(wrong)
    assert np.isfinite(make(1).item())


def test_a_number_is_looked_at_on_the_host():
    with pytest.raises(IndexingError, match="index 9 is out of range"):
        tg.take(tg.ones(N), tg.asarray(9))


def step(model, optimizer, tokens):
    with tg.GradientTape() as tape:
        logits = model(tokens)
        loss = tg.mean(tg.nn.functional.cross_entropy(tg.reshape(logits, (-1, N)), tg.reshape(tokens, (-1,))))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


@pytest.fixture
def training():
    tg.random.seed(0)
    model = tg.nn.Sequential([tg.nn.Embedding(N, 8), tg.nn.Dense(8, activation="gelu"), tg.nn.Dense(N)])
    optimizer, tokens = tg.optim.Adam(1e-2), tg.asarray(np.arange(12).reshape(2, 6) % N)
    return lambda: step(model, optimizer, tokens)


def copies():
    return sum(e.kind == "d2h" for e in standin.events)


@pytest.mark.parametrize("every", [1, 10])
def test_reading_the_loss_costs_one_copy(training, every):
    training().item()
    for _ in range(2):
        standin.events.clear()
        for _ in range(every):
            loss = training()
        assert copies() == 0
        loss.item()
        assert copies() == 1


def test_a_check_takes_no_memory_and_one_launch(training, cuda):
    training().item()
    tokens = tg.asarray(np.arange(12) % N)
    gc.collect()
    # A check says what to raise; weak references are callable, too.
    errors = lambda: sum(callable(x) and not isinstance(x, weakref.ref) for x in gc.get_objects())
    before, known = cuda.usage()[0], errors()
    for _ in range(400):  # none is read
        tg.take(tg.ones(N), tokens)
    standin.launches.clear()
    gone = tg.take(tg.ones(N), tokens)
    assert [one.name for one in standin.launches].count("tg_within") == 1
    del gone
    assert cuda.usage()[0] == before and errors() - known < 100


def test_the_first_mistake_is_told(cupy):
    for first, second in ((take, placed), (placed, take)):
        with changing(cupy):
            made = [first(7), second(8), labelled(9)]
        with pytest.raises(IndexingError, match="index 7 is out of range"):
            made[0].item()
        assert np.isfinite(made[1].item()), "the others are not told of"


def test_of_several_wrong_values_the_least_negative_or_the_greatest_is_named():
    for places, named in (([9, 7, 8], 9), ([9, -9, -8], -9)):
        with pytest.raises(IndexingError, match=f"index {named} is out of range"):
            tg.take(tg.ones(N), tg.asarray(places)).numpy()


def test_each_device_has_a_record_of_its_own():
    with tg.device("cuda:1"):
        wrong, there = take(7), tg.ones(2) * 1
    assert (tg.ones(2) * 1).numpy().sum() == 2
    with pytest.raises(IndexingError, match="index 7"):
        there.numpy()
    wrong.numpy()


def test_a_dry_run_asks_for_nothing(training):
    training().item()
    standin.launches.clear()
    assert tg.memory.predict_peak(lambda: take(7)).peak_bytes > 0
    assert not standin.launches
    tg.ones(2).numpy()
