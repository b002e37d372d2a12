"""``DataLoader``: batches in a seeded order, prepared by other threads or processes, sent ahead to the device.

The order of an epoch is a function of the seed and the epoch's number alone, so the state of a loader is three numbers.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from numbers import Integral
from typing import Any

import tapegrad.random as random
from tapegrad import nest, ops
from tapegrad.device import CPU, Device, asdevice, current_device
from tapegrad.errors import NotATensorError, ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.spellings import Named
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

_np = CPU.xp
Batch = Any


class DataLoader(Named):
    """Batches of examples, epoch after epoch: ``for x, y in loader`` is one epoch.

    data: arrays with the examples on their first axis, in a tuple, list or dict, say; or any object with ``len()``
    whose ``data[i]`` is an example: numbers and arrays, in a structure.  A list of tuples, dicts or
    numbers is one of examples, too.  A batch has that structure, of tensors.

    ``shuffle``: in another order each epoch, which ``seed`` and the epoch's number determine.  ``drop_last``: leave out
    the last examples if they do not fill a batch, so that all batches have one shape (``tg.function`` makes a program
    for each).  ``workers``: processes that prepare batches of examples (``data[i]``); they import the main module
    anew, so a script with workers starts under ``if __name__ == "__main__":``.  Without workers a thread does it.
    What ``data[i]`` draws at random it should draw from a stream of ``i``: which worker is asked is left open.
    ``prefetch``: batches that are prepared ahead, and of these the next one is on the ``device`` (by default the
    current one) already; 0: none, and no thread.  ``collate``: makes a batch of arrays from a list of examples, by
    default by stacking.

    ``state_dict()`` tells where the loader is, also in the middle of an epoch: a loader of the same data that is given
    it goes on with the batch after the last one that was taken (none, if that was the epoch's last).  Leaving a loop
    early ends the epoch.

    Raises TapegradError for arguments out of range, ShapeError for arrays of different lengths, NotATensorError for
    data without length.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int = 32,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        device: str | Device | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.batch_size = checks.positive("DataLoader", "batch_size", batch_size)
        for name, value in (("workers", workers), ("prefetch", prefetch), ("seed", seed)):
            if not isinstance(value, (int, Integral)) or value < 0:
                raise TapegradError(f"DataLoader: wanted an integer of at least 0 for {name}, got {value!r}")
        self.shuffle, self.seed, self.drop_last = shuffle, int(seed), drop_last
        self.workers, self.prefetch = int(workers), int(prefetch)
        self.device = None if device is None else asdevice(device)
        self._source = _source(data, collate)
        self._epoch = self._taken = 0
        self._begun = self._ended = False
        """Whether an epoch was begun, with which the next loop does not go on, and whether it was gone through."""

    def __repr__(self) -> str:
        return f"DataLoader({len(self._source)} examples in batches of {self.batch_size})"

    def __len__(self) -> int:
        """How many batches an epoch has."""
        n = len(self._source)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    @property
    def epoch(self) -> int:
        """The number of the epoch that goes on, or comes next; the first is 0."""
        return self._epoch + self._ended

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: the seed, the epoch, and how many of its batches were taken."""
        return {"seed": self.seed, "epoch": self.epoch, "batch": 0 if self._ended else self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a loader of the same data was.  Raises TapegradError for what is no such state."""
        if set(state) != {"seed", "epoch", "batch"} or not 0 <= state["batch"] <= len(self) or state["epoch"] < 0:
            raise TapegradError(
                f"DataLoader: wanted seed, epoch and batch, at most {len(self)} of them, got {dict(state)}; "
                "is it the state of a loader of other data, or with another batch_size?"
            )
        self.seed, self._epoch, self._taken = state["seed"], state["epoch"], state["batch"]
        self._begun = self._ended = False

    def __iter__(self) -> Iterator[Batch]:
        if self._begun:
            self._epoch, self._taken = self._epoch + 1, 0
        self._begun, self._ended = True, False
        return self._batches(self._epoch, self._taken)

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        device = self.device or current_device()
        order, size = self._order(epoch), self.batch_size
        wanted = (order[i * size : (i + 1) * size] for i in range(first, len(self)))
        arrays = self._prepared(wanted) if self.prefetch else map(self._source.batch, wanted)
        sent: deque[Batch] = deque()
        try:
            for batch in arrays:
                sent.append(nest.map_leaves(lambda x: _on(device, x), batch))
                if len(sent) > bool(self.prefetch):  # one is on its way while another is computed with
                    self._taken += 1
                    yield sent.popleft()
            while sent:
                self._taken += 1
                yield sent.popleft()
            self._ended = True
        finally:
            if self.prefetch:
                arrays.close()  # type: ignore[attr-defined]  # a generator

    def _order(self, epoch: int) -> Any:
        n = len(self._source)
        if not self.shuffle:
            return _np.arange(n)
        stream = random.Generator(self.seed + (epoch << 64))
        return random.permutation(ops.arange(n, device="cpu"), generator=stream).numpy()

    def _prepared(self, wanted: Iterator[Any]) -> Iterator[Any]:
        """Batches in order; ``prefetch`` of them are asked for ahead."""
        pool, work = self._pool()
        asked: deque[Future[Any]] = deque()
        try:
            for indices in wanted:
                asked.append(self._asked(pool, work, indices))
                if len(asked) > self.prefetch:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _asked(self, pool: Executor, work: Callable[[Any], Any], indices: Any) -> Future[Any]:
        try:
            return pool.submit(work, indices)
        except (pickle.PicklingError, AttributeError, TypeError) as e:  # the first batch starts the workers
            raise TapegradError(
                f"DataLoader: workers are processes, to which data and collate= are sent as pickles, and these have "
                f"none: {e}; define their functions and classes at the top of a module, or leave out workers="
            ) from e

    def _pool(self) -> tuple[Executor, Callable[[Any], Any]]:
        if not self.workers:
            return ThreadPoolExecutor(1, "tapegrad-loader"), self._source.batch
        spawning = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        return ProcessPoolExecutor(self.workers, spawning, _begin_worker, (self._source,)), _batch_of_worker


class _Arrays:
    """Examples on the first axes of arrays."""

    def __init__(self, data: Any) -> None:
        self._data = nest.map_leaves(_array, data)
        sizes = [x.shape[:1] for x in nest.flatten(self._data)]
        if not sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise ShapeError(f"DataLoader: wanted arrays with as many examples on their first axes, got {sizes}")
        self._length = sizes[0][0]

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Any) -> Any:
        """The rows of each array, copied."""
        return nest.map_leaves(lambda x: x[indices], self._data)


class _Examples:
    """Examples that an object gives one by one."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._data, self._collate = data, _stacked if collate is None else collate

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: Any) -> Any:
        """Several examples together."""
        return self._collate([self._data[int(i)] for i in indices])


def _source(data: Any, collate: Callable[[list[Any]], Any] | None) -> _Arrays | _Examples:
    if collate is None and not _lists_examples(data) and all(hasattr(x, "shape") for x in nest.flatten(data)):
        return _Arrays(data)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise NotATensorError(
            f"DataLoader: wanted arrays, or an object with len() and [i], got {type(data).__name__}; "
            "an iterator has no order to shuffle: make a list of it"
        )
    return _Examples(data, collate)


def _lists_examples(data: Any) -> bool:
    """Whether ``data`` is a list of examples, and no structure of arrays with the examples on their first axes."""
    return isinstance(data, list) and all(isinstance(x, (tuple, dict)) or not getattr(x, "ndim", 0) for x in data)


def _array(x: Any) -> Any:
    return x.numpy() if isinstance(x, (Tensor, Variable)) else _np.asarray(x)


def _stacked(examples: list[Any]) -> Any:
    """A structure of arrays from a list of examples of that structure.  Raises StructureError, ShapeError."""
    columns = [nest.require_alike("DataLoader", "an example", e, "the first", examples[0]) for e in examples]
    # Python's floats become float32, as everywhere.
    rows = [[_np.asarray(x, "float32" if type(x) is float else None) for x in column] for column in zip(*columns)]
    for column in rows:
        if len({x.shape for x in column}) > 1:
            shapes = sorted({x.shape for x in column})
            raise ShapeError(f"DataLoader: examples of shapes {shapes} do not make a batch; pad them in collate=")
    return nest.rebuild(examples[0], iter([_np.stack(column) for column in rows]))


def _on(device: Device, x: Any) -> Any:
    return ops.asarray(x, device=device) if hasattr(x, "shape") else x


_worker: list[_Arrays | _Examples] = []


def _begin_worker(source: _Arrays | _Examples) -> None:
    _worker.append(source)


def _batch_of_worker(indices: Any) -> Any:
    return _worker[0].batch(indices)
