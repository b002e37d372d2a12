"""Nodes and leaves."""

import numpy as np
import pytest

from tapegrad.core.aval import shaped
from tapegrad.core.node import LEAF, SHARED, leaf
from tapegrad.core.primitive import REGISTRY
from tapegrad.device import CPU


def test_a_leaf_says_so_and_has_no_recipe():
    node = leaf(shaped((2,), np.dtype("float32"), CPU), shared=True)
    assert node.prim is LEAF and node.params is SHARED and repr(node).endswith("= leaf")
    assert LEAF not in REGISTRY.values() and not LEAF.differentiable and not LEAF.view
    with pytest.raises(TypeError, match="a leaf has no recipe"):
        node.prim.infer(node.aval)


def test_indices_are_an_order():
    aval = shaped((), np.dtype("float32"), CPU)
    first, second = leaf(aval), leaf(aval)
    assert first.index < second.index
