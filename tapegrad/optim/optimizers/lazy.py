"""Optimizers that change the rows alone which a gradient names, where their plain forms change all rows."""

from __future__ import annotations

from tapegrad.optim.optimizers.adam import Adam, AdamW
from tapegrad.optim.optimizers.sgd import SGD


class LazyAdam(Adam):
    """Adam that changes the rows alone which an IndexedSlices names: of the variable, ``m`` and ``v``.

    In :class:`Adam`, as in Keras, a row without a gradient goes on by its momentum while ``m`` and ``v`` decay, which
    costs a pass over the whole table; here it stays as it is until it is named again.  So the results differ.  The
    number of the step, by which both are corrected, is that of all steps.  A gradient that is an array makes the step
    of Adam.

    The name is that of TensorFlow Addons, whose optimizer takes arrays as well; PyTorch calls it ``SparseAdam``, and
    refuses them.  Arguments are Adam's; ``weight_decay`` shrinks the named rows alone.
    """

    rows_alone = True


class LazyAdamW(AdamW):
    """:class:`LazyAdam` with decoupled weight decay on by default: it shrinks the named rows alone.

    So does TensorFlow Addons' ``DecoupledWeightDecayExtension`` where a gradient is an IndexedSlices.
    """

    rows_alone = True


class LazySGD(SGD):
    """SGD whose momentum and decay change the rows alone which an IndexedSlices names.

    So does TensorFlow's ``tf.compat.v1.train.MomentumOptimizer``; Keras and PyTorch let every row go on by its
    momentum, as :class:`SGD` does.  Without momentum and decay both are the same.
    """

    rows_alone = True
