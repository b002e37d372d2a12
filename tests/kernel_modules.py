"""The package's modules that write and launch CUDA kernels of whole operations: their names are here alone."""

from tapegrad.ops.index import _cuda_index as index
from tapegrad.ops.products import _attention_tiles as attention_tiles
from tapegrad.ops.products import _cuda_attention as attention
from tapegrad.ops.products import _cuda_conv as convolution

__all__ = ["attention", "attention_tiles", "convolution", "index"]
