"""For tests of programs that use tapegrad: derivatives against differences, and peaks against limits."""

from tapegrad.spellings import explain
from tapegrad.testing.derivatives import DerivativeError, check_grads
from tapegrad.testing.peaks import PeakError, assert_peak

__all__ = ["DerivativeError", "PeakError", "assert_peak", "check_grads"]
explain(globals(), __name__)
