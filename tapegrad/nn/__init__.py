"""Layers under Keras' names, functions under torch.nn.functional's names, weights saved with safetensors.

A layer is a callable with variables: it makes them when it first sees an input, and ``model.variables`` lists them in
the order in which they were made.
"""

from __future__ import annotations

from tapegrad.nn import functional, initializers
from tapegrad.nn.layers.attention import MultiHeadAttention
from tapegrad.nn.layers.convolution import (
    AveragePooling1D,
    AveragePooling2D,
    AveragePooling3D,
    BatchNormalization,
    Conv1D,
    Conv2D,
    Conv3D,
    GlobalAveragePooling2D,
    MaxPool1D,
    MaxPool2D,
    MaxPool3D,
)
from tapegrad.nn.layers.core import Dense, Dropout, Embedding, Lambda, LayerNormalization, Sequential
from tapegrad.nn.layers.layer import Layer
from tapegrad.spellings import explain

__all__ = [
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "BatchNormalization",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "Dense",
    "Dropout",
    "Embedding",
    "GlobalAveragePooling2D",
    "Lambda",
    "Layer",
    "LayerNormalization",
    "MaxPool1D",
    "MaxPool2D",
    "MaxPool3D",
    "MultiHeadAttention",
    "Sequential",
    "functional",
    "initializers",
]
explain(globals(), __name__)
