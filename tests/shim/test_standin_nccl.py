"""The stand-in's NCCL: CuPy's signatures, and what NCCL refuses, waits for in vain, or is a race.

What concerns one rank alone runs here; what concerns two, on two processes of MPI (``nccl_calls.py``).
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from distributed import ranks

from shim import happens, standin
from shim.standin import nccl as ours

needs_mpi = pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
_REAL = {
    "NcclCommunicator": "(int ndev, bytes commId, int rank, NcclConfig config=None)",
    "send": "(intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)",
    "recv": "(intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)",
    "broadcast": "(intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root, intptr_t stream)",
    "bcast": "(intptr_t buff, size_t count, int datatype, int root, intptr_t stream)",
    "allReduce": "(intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, intptr_t stream)",
    "check_async_error": "()", "abort": "()", "destroy": "()", "device_id": "()", "rank_id": "()", "size": "()",
}  # fmt: skip
"""As the documentation in CuPy's compiled module has them, without ``self``."""


@pytest.fixture
def cupy():
    """The stand-in, installed for one test."""
    yield standin.install()
    happens.taken()
    standin.uninstall()


def _parameters(signature: str) -> list[str]:
    return re.findall(r"(\w+)(?==|,|\))", signature.replace("=None", ""))


@pytest.mark.parametrize("name", _REAL)
def test_parameters_are_cupys(name):
    method = ours.NcclCommunicator.__init__ if name == "NcclCommunicator" else getattr(ours.NcclCommunicator, name)
    assert list(inspect.signature(method).parameters)[1:] == _parameters(_REAL[name])


def test_signatures_are_those_of_the_compiled_module():
    spec = importlib.util.find_spec("cupy_backends")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("CuPy is not installed")
    file = next((Path(spec.submodule_search_locations[0]) / "cuda" / "libs").glob("nccl.*.so"))
    data = file.read_bytes().decode("latin-1")
    for name, signature in _REAL.items():
        if name == "NcclCommunicator":
            assert name + signature in data
        else:
            inside = signature.strip("()")
            assert f"NcclCommunicator.{name}(self{', ' + inside if inside else ''})" in data, name
    for name in (n for n in vars(ours) if n.startswith("NCCL_")):
        assert name in data


def test_codes_are_nccls():
    codes = [getattr(ours, f"NCCL_{name}") for name in
             "INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16".split()]  # fmt: skip
    assert codes == list(range(10))
    assert [getattr(ours, f"NCCL_{name}") for name in "SUM PROD MAX MIN AVG".split()] == list(range(5))


@pytest.fixture
def alone(cupy):
    """A communicator of one rank, and a stream."""
    pytest.importorskip("mpi4py")
    from cupy.cuda import nccl

    return nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), cupy.cuda.Stream(non_blocking=True)


def test_what_one_rank_may_not_ask(cupy, alone):
    from cupy.cuda import nccl

    communicator, stream = alone
    x = cupy.zeros(4, "float32")
    for bad in (
        lambda: communicator.allReduce(x.data.ptr, x.data.ptr, 4, 10, nccl.NCCL_SUM, stream.ptr),
        lambda: communicator.allReduce(x.data.ptr, x.data.ptr, 4, nccl.NCCL_FLOAT32, 7, stream.ptr),
        lambda: communicator.send(x.data.ptr, 4, nccl.NCCL_FLOAT32, 1, stream.ptr),
        lambda: nccl.NcclCommunicator(1, nccl.get_unique_id(), 1),
        nccl.groupEnd,
    ):
        with pytest.raises(nccl.NcclError):
            bad()
    with pytest.raises(TypeError):
        nccl.NcclCommunicator(1, (0,) * 128, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="IllegalAddress"):  # 8 bytes an element are too many
        communicator.allReduce(x.data.ptr, x.data.ptr, 512, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream.ptr)
    with cupy.cuda.Device(1), pytest.raises(nccl.NcclError):
        communicator.allReduce(x.data.ptr, x.data.ptr, 4, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    communicator.destroy()
    with pytest.raises(nccl.NcclError):
        communicator.broadcast(x.data.ptr, x.data.ptr, 4, nccl.NCCL_FLOAT32, 0, stream.ptr)


def test_a_capturing_stream_is_refused(cupy, alone):
    from cupy.cuda import nccl

    communicator, stream = alone
    x = cupy.zeros(4, "float32")
    stream.begin_capture()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="not permitted when stream is capturing"):
        communicator.allReduce(x.data.ptr, x.data.ptr, 4, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        stream.end_capture()


def reduce(nccl, communicator, x, stream):
    communicator.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)


def test_a_buffer_before_its_event_is_a_race(cupy, alone):
    from cupy.cuda import nccl

    communicator, stream = alone
    x = cupy.zeros(4, "float32")
    stream.wait_event(cupy.cuda.Stream.null.record())
    happens.taken()
    reduce(nccl, communicator, x, stream)
    x += 1  # the sum may not have been written
    assert any("op" in race or "add" in race for race in happens.taken())


def test_a_buffer_after_its_event_is_none(cupy, alone):
    from cupy.cuda import nccl

    communicator, stream = alone
    x = cupy.zeros(4, "float32")
    stream.wait_event(cupy.cuda.Stream.null.record())
    reduce(nccl, communicator, x, stream)
    cupy.cuda.Stream.null.wait_event(stream.record())
    x += 1
    assert not happens.taken()


@pytest.mark.parametrize("ordered", [True, False])
def test_two_communicators_at_once_are_a_race(cupy, alone, ordered):
    from cupy.cuda import nccl

    one, stream = alone
    two, other = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(4, "float32"), cupy.zeros(4, "float32")
    ready = cupy.cuda.Stream.null.record()
    stream.wait_event(ready)
    other.wait_event(ready)
    reduce(nccl, one, x, stream)
    if ordered:
        other.wait_event(stream.record())
    reduce(nccl, two, y, other)
    assert bool(happens.taken()) != ordered


def outcome(program: str) -> str:
    done = ranks.start(2, str(Path(__file__).with_name("nccl_calls.py")), program)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_mpi
@pytest.mark.parametrize("program", ["facing", "alone"])
def test_messages_that_wait_for_each_other_stick(program):
    assert outcome(program).count("sticks") == 2


@needs_mpi
def test_messages_in_a_group_arrive():
    assert outcome("grouped").count("arrived") == 2


@needs_mpi
def test_one_device_is_no_two_ranks():
    assert outcome("twice").count("Duplicate GPU detected") == 2


@needs_mpi
def test_sums_are_in_an_order_of_nccls():
    assert outcome("sum").count("summed") == 2


def test_the_byte_of_the_library_is_no_memory():
    assert all(np.uintp(at) < 4096 for at, _ in ours._LIBRARY)
