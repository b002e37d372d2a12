"""Memory: the ledger, and checkpoints that trade time for bytes."""

from tapegrad.memory.ledger import CATEGORIES, LEDGER, Measure, measure
from tapegrad.memory.recompute import recompute_grad

__all__ = ["CATEGORIES", "LEDGER", "Measure", "measure", "recompute_grad"]
