"""Products of arrays: matrices, tensors, convolutions."""
