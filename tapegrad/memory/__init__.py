"""Memory: the ledger, budgets that are kept, and checkpoints that trade time for bytes."""

from tapegrad.memory import policies
from tapegrad.memory.budget.budget import keep, memory_budget, policy
from tapegrad.memory.checkpoint.loop import checkpointed_loop
from tapegrad.memory.checkpoint.recompute import recompute_grad
from tapegrad.memory.checkpoint.reversible import reversible
from tapegrad.memory.checkpoint.sequential import CheckpointedSequence, checkpoint_sequential
from tapegrad.memory.ledger.blocks import measure, scope
from tapegrad.memory.ledger.figures import CATEGORIES, Measure
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import step
from tapegrad.memory.offload import tiers
from tapegrad.memory.plan import use_plan
from tapegrad.memory.predict import Point, Prediction, ShapeDtype, predict_peak
from tapegrad.memory.report import Report, Row, Saved, report, saved
from tapegrad.spellings import open_to_users

__all__ = [
    "CATEGORIES", "LEDGER", "CheckpointedSequence", "Measure", "Point", "Prediction", "Report", "Row", "Saved",
    "ShapeDtype", "checkpoint_sequential", "checkpointed_loop", "keep", "measure", "memory_budget", "policies",
    "policy", "predict_peak", "recompute_grad", "report", "reversible", "saved", "scope", "step",
    "tiers", "use_plan",
]  # fmt: skip
open_to_users(globals(), __name__)
