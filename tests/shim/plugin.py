"""A pytest plugin (``-p shim.plugin``, ``tests`` being on the path): CuPy is the stand-in, CUDA the default device.

After each test the happens-before checker looks at the order of what the test has put on streams; a race fails it.
``--change-streams``: what a test asks of a device goes to another stream each time.
"""

from collections.abc import Iterator

import pytest

from shim import happens, standin
from shim.streams import changing

cupy = standin.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--change-streams", action="store_true", help="ask each thing of a device on another stream")


@pytest.fixture(autouse=True)
def ordered_streams(request: pytest.FixtureRequest) -> Iterator[None]:
    """No two accesses of the test's to the same bytes are without an order."""
    happens.taken()
    if request.config.getoption("--change-streams"):
        with changing(cupy):
            yield
    else:
        yield
    happens.check()
