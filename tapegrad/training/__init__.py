"""Training: data in batches, figures, and a loop over them with callbacks.

``DataLoader`` gives batches and tells where it is; metrics add up on the device; ``fit`` calls a step of the user's for
each batch, and callbacks at its turning points, of which ``Checkpoint`` lets a training go on with the same bits.
"""

from __future__ import annotations

from tapegrad.spellings import explain
from tapegrad.training.callbacks import CSVLogger, EarlyStopping, ProgressBar
from tapegrad.training.checkpoint import Checkpoint
from tapegrad.training.fit import Callback, Run, fit
from tapegrad.training.loader import DataLoader
from tapegrad.training.metrics import (
    AUC,
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    ConfusionMatrix,
    Mean,
    Metric,
    SparseCategoricalAccuracy,
)

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CSVLogger",
    "Callback",
    "CategoricalAccuracy",
    "Checkpoint",
    "ConfusionMatrix",
    "DataLoader",
    "EarlyStopping",
    "Mean",
    "Metric",
    "ProgressBar",
    "Run",
    "SparseCategoricalAccuracy",
    "fit",
]
explain(globals(), __name__)
