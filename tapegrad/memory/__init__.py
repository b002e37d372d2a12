"""``tg.memory``: measures, reports, budgets that are kept, and checkpoints that trade time for bytes."""

from tapegrad.remat import policies
from tapegrad.remat.budget.budget import keep, memory_budget, policy
from tapegrad.remat.checkpoint.loop import checkpointed_loop
from tapegrad.remat.checkpoint.recompute import recompute_grad
from tapegrad.remat.checkpoint.reversible import reversible
from tapegrad.remat.checkpoint.sequential import CheckpointedSequence, checkpoint_sequential
from tapegrad.remat.offload import tiers
from tapegrad.remat.plan import use_plan
from tapegrad.remat.predict import Point, Prediction, ShapeDtype, predict_peak
from tapegrad.remat.report import Report, Row, Saved, report, saved
from tapegrad.spellings import open_to_users
from tapegrad.tracing.contexts import measure, scope
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import CATEGORIES, Measure
from tapegrad.tracing.phase import step

__all__ = [
    "CATEGORIES", "LEDGER", "CheckpointedSequence", "Measure", "Point", "Prediction", "Report", "Row", "Saved",
    "ShapeDtype", "checkpoint_sequential", "checkpointed_loop", "keep", "measure", "memory_budget", "policies",
    "policy", "predict_peak", "recompute_grad", "report", "reversible", "saved", "scope", "step",
    "tiers", "use_plan",
]  # fmt: skip
open_to_users(globals(), __name__)
