"""assert_peak and its fixture: the limit is the ledger's peak to the byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tapegrad as tg
from tapegrad.testing import PeakError, assert_peak

pytestmark = pytest.mark.sampled(1 / 2)


def twice(x: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
    y = x @ x
    return y, y @ x


X = tg.ones((128, 128))
SIZE = 128 * 128 * 4


def test_the_limit_holds_to_the_byte() -> None:
    y, z = assert_peak(twice, X, max_bytes=2 * SIZE)
    assert y.shape == z.shape == (128, 128)
    with pytest.raises(PeakError) as caught:
        assert_peak(twice, X, max_bytes=2 * SIZE - 1)
    assert (caught.value.took_bytes, caught.value.max_bytes) == (2 * SIZE, 2 * SIZE - 1)


def test_what_was_alive_before_does_not_count() -> None:
    held = [X @ X for _ in range(5)]
    assert_peak(twice, x=held[0], max_bytes=2 * SIZE)


def test_the_error_says_what_was_alive_and_where() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_peak(twice, X, max_bytes="1KiB")
    first, second, *lines = str(caught.value).split("\n")
    assert (
        first.startswith(f"twice took 128.00 KiB ({2 * SIZE} bytes) beyond the ") and "max_bytes is 1.00 KiB" in first
    )
    line = f"{__file__}:{twice.__code__.co_firstlineno + 1}"
    assert second.startswith("at the peak: user ") and any(line in text for text in lines)


def test_what_goes_wrong_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        assert_peak(lambda: 1 / 0, max_bytes=1)
    with pytest.raises(ValueError, match="a size is a positive whole number"):
        assert_peak(twice, X, max_bytes="much")
    with pytest.raises(TypeError, match="max_bytes"):
        assert_peak(twice, X)  # type: ignore[call-arg]
    assert assert_peak(tg.zeros, (0, 3), max_bytes=1).shape == (0, 3)


TESTS = """
import tapegrad as tg

def test_little(max_bytes):
    max_bytes("129KiB")
    tg.ones((128, 128)) + 1.0

def test_much(max_bytes):
    max_bytes("1MiB")
    max_bytes("63KiB")
    tg.ones((128, 128)).numpy()

def test_without_a_limit(max_bytes):
    tg.ones((128, 128)).numpy()
"""


def test_the_fixture_ends_a_test_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tapegrad.testing.fixtures import max_bytes\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "3 passed, 1 error" in found.stdout, found.stdout
    assert "PeakError: test_much took 64.00 KiB" in found.stdout and "ERROR test_it.py::test_much" in found.stdout


def test_pytest_is_not_imported_before_it_is_asked_for() -> None:
    code = "import sys, tapegrad as tg; tg.testing.assert_peak; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
