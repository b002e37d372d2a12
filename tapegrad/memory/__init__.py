"""Memory: the ledger, budgets that are kept, and checkpoints that trade time for bytes."""

from tapegrad.memory import policies, tiers
from tapegrad.memory.applying import use_plan
from tapegrad.memory.budget import memory_budget, policy
from tapegrad.memory.figures import CATEGORIES, Measure
from tapegrad.memory.ledger import LEDGER
from tapegrad.memory.loop import checkpointed_loop
from tapegrad.memory.measure import measure
from tapegrad.memory.predict import Point, Prediction, ShapeDtype, predict_peak
from tapegrad.memory.recompute import recompute_grad
from tapegrad.memory.report import Report, Row, Saved, report, saved
from tapegrad.memory.reversible import reversible
from tapegrad.memory.scope import scope
from tapegrad.memory.sequential import CheckpointedSequence, checkpoint_sequential
from tapegrad.memory.steps import step

__all__ = [
    "CATEGORIES", "LEDGER", "CheckpointedSequence", "Measure", "Point", "Prediction", "Report", "Row", "Saved",
    "ShapeDtype", "checkpoint_sequential", "checkpointed_loop", "measure", "memory_budget", "policies",
    "policy", "predict_peak", "recompute_grad", "report", "reversible", "saved", "scope", "step",
    "tiers", "use_plan",
]  # fmt: skip
