"""Devices, conversion, dtypes, random bits."""

import random

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import CPU, current_device, dtypes
from tapegrad.device.numerics import bits
from tapegrad.errors import DeviceError, DTypeError, NotATensorError


def test_python_numbers_become_tensorflows_dtypes():
    got = [tg.asarray(x).dtype.name for x in (1.0, 1, True, 1j, [1, 2.0], [[1, 2]], np.float64(1), [np.float64(1)])]
    assert got == ["float32", "int64", "bool", "complex64", "float32", "int64", "float64", "float64"]


def test_arrays_are_copied_unless_asked_not_to():
    a = np.arange(3.0)
    copied, shared = tg.asarray(a), tg.asarray(a, copy=False)
    a[0] = 9
    assert copied.numpy()[0] == 0 and shared.numpy()[0] == 9


def test_big_endian_and_strided_arrays_are_taken():
    a = np.arange(6, dtype=">f4").reshape(2, 3).T
    t = tg.asarray(a)
    assert t.dtype == np.dtype("float32") and np.array_equal(t.numpy(), a)


@pytest.mark.parametrize("thing", [object(), "text", None, [1, "x"], {"a": 1}, np.array(["x"]), np.array([None])])
def test_what_is_no_number_is_refused(thing):
    with pytest.raises(NotATensorError):
        tg.asarray(thing)


def test_ragged_lists_are_refused():
    with pytest.raises(NotATensorError):
        tg.asarray([[1, 2], [3]])


def test_devices():
    assert current_device() is CPU and repr(CPU) == "cpu"
    with tg.device("cpu") as d:
        assert tg.zeros(2).device is d
    for bad in ("cuda:77", "tpu", 3):
        with pytest.raises(DeviceError, match="not available"), tg.device(bad):
            pass
    tg.set_default_device("cpu")


def test_dtypes():
    assert dtypes.asdtype("float32") == dtypes.asdtype(np.float32) == dtypes.float32
    with pytest.raises(DTypeError):
        dtypes.asdtype("float33")
    for name in ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"):
        assert dtypes.in_float(np.dtype(name)) == np.exp(np.ones(1, name)).dtype
        assert dtypes.sum_dtype(np.dtype(name)) == np.sum(np.ones(1, name)).dtype


def test_philox_is_numpys_and_counts_blocks():
    whole = bits.philox(7, 0, 16)
    assert np.array_equal(whole, np.random.Philox(key=7).random_raw(16))
    assert np.array_equal(whole[8:], bits.philox(7, 2, 8))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_uniform_bits_fill_the_unit_interval(dtype):
    u = bits.uniform(3, 0, (100_001,), np.dtype(dtype))
    assert u.dtype == dtype and 0 <= u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1 and abs(u.mean() - 0.5) < 0.01


def test_host_generators_are_seen_to_have_moved():
    before = bits.host_state()
    assert bits.moved(before, bits.host_state()) == ()
    first = np.random.rand()
    assert bits.moved(before, bits.host_state()) == (0,)
    second = random.random()
    after = bits.host_state()
    assert bits.moved(before, after) == (0, 1)
    assert bits.moved(bits.set_host_state(before, (0,)), after) == ()
    assert bits.moved(before, bits.host_state()) == (1,) and np.random.rand() == first
    bits.set_host_state(before)
    assert np.random.rand() == first and random.random() == second


def test_a_single_normal_number_moves_the_host_although_no_word_is_drawn():
    np.random.seed(3)
    np.random.normal()  # draws two, and keeps one
    before = bits.host_state()
    np.random.normal()
    assert bits.moved(before, bits.host_state()) == (0,)


def test_another_bit_generator_of_the_hosts_moves_as_well():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        before = bits.host_state()
        assert bits.moved(before, bits.host_state()) == ()
        first = np.random.rand()
        assert bits.moved(before, bits.host_state()) == (0,)
        bits.set_host_state(before)
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(usual)


def test_checksums_tell_bits_apart():
    a = np.array([0.0, 1.0])
    assert bits.checksum(a) == bits.checksum(a.copy()) != bits.checksum(np.array([-0.0, 1.0]))
    assert bits.checksum(np.zeros((0, 3))) == bits.checksum(np.zeros((3, 0)))
