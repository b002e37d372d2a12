"""Layers under Keras' names, functions under torch.nn.functional's names, weights saved with safetensors.

A layer is a callable with variables: it makes them when it first sees an input, and ``model.variables`` lists them in
the order in which they were made.
"""

from __future__ import annotations

from tapegrad.nn import functional, initializers
from tapegrad.nn.layers.activation import ELU, Activation, LeakyReLU, PReLU, ReLU, Softmax
from tapegrad.nn.layers.attention import MultiHeadAttention
from tapegrad.nn.layers.convolution import (
    AveragePooling1D,
    AveragePooling2D,
    AveragePooling3D,
    BatchNormalization,
    Conv1D,
    Conv2D,
    Conv3D,
    GlobalAveragePooling1D,
    GlobalAveragePooling2D,
    GlobalAveragePooling3D,
    GlobalMaxPooling1D,
    GlobalMaxPooling2D,
    GlobalMaxPooling3D,
    GroupNormalization,
    MaxPool1D,
    MaxPool2D,
    MaxPool3D,
)
from tapegrad.nn.layers.core import Dense, Dropout, Embedding, Lambda, LayerNormalization, Sequential
from tapegrad.nn.layers.layer import Layer
from tapegrad.nn.layers.recurrent import GRU, LSTM, Bidirectional, SimpleRNN
from tapegrad.nn.layers.reshaping import Flatten, Permute, Reshape
from tapegrad.spellings import explain

__all__ = [
    "ELU",
    "GRU",
    "LSTM",
    "Activation",
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "BatchNormalization",
    "Bidirectional",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePooling1D",
    "GlobalAveragePooling2D",
    "GlobalAveragePooling3D",
    "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
    "GlobalMaxPooling3D",
    "GroupNormalization",
    "Lambda",
    "Layer",
    "LayerNormalization",
    "LeakyReLU",
    "MaxPool1D",
    "MaxPool2D",
    "MaxPool3D",
    "MultiHeadAttention",
    "PReLU",
    "Permute",
    "ReLU",
    "Reshape",
    "Sequential",
    "SimpleRNN",
    "Softmax",
    "functional",
    "initializers",
]
explain(globals(), __name__)
