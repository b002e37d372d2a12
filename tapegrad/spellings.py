"""Names of other libraries, and how tapegrad spells them: what errors say to those who write TensorFlow's or PyTorch's.

The tables are read when a name was not found, never before.  Nothing of them is an attribute: ``hasattr`` is False.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FrameType
from typing import Any, NoReturn, Self

from tapegrad.errors import ArgumentError, TapegradError

NAMES = {
    # TensorFlow
    "reduce_sum": "tg.sum",
    "reduce_mean": "tg.mean",
    "reduce_prod": "tg.prod",
    "reduce_max": "tg.max",
    "reduce_min": "tg.min",
    "reduce_any": "tg.any",
    "reduce_all": "tg.all",
    "reduce_std": "tg.std",
    "reduce_variance": "tg.var",
    "reduce_logsumexp": "tg.logsumexp",
    "reduce_euclidean_norm": "tg.linalg.norm",
    "cast": "tg.astype",
    "convert_to_tensor": "tg.asarray",
    "boolean_mask": "x[mask]",
    "clip_by_value": "tg.clip",
    "clip_by_norm": "tg.optim.clip_by_norm",
    "range": "tg.arange",
    "rank": "tg.ndim",
    "fill": "tg.full",
    "reverse": "tg.flip",
    "add_n": "tg.sum(tg.stack(xs), axis=0)",
    "truediv": "tg.divide",
    "floordiv": "tg.floor_divide",
    "floormod": "tg.remainder",
    "norm": "tg.linalg.norm",
    "slice": "x[start:stop]",
    "strided_slice": "x[start:stop:step]",
    "gather": "tg.take(x, indices, axis) (TensorFlow's) or tg.take_along_axis(x, indices, axis) (PyTorch's)",
    "scatter_nd": "tg.zeros(shape).at[index].add(updates)",
    "tensor_scatter_nd_add": "x.at[index].add(updates)",
    "tensor_scatter_nd_sub": "x.at[index].subtract(updates)",
    "tensor_scatter_nd_update": "x.at[index].set(updates)",
    "tensor_scatter_nd_max": "x.at[index].max(updates)",
    "tensor_scatter_nd_min": "x.at[index].min(updates)",
    "gradients": "tg.GradientTape, or tg.grad(f)",
    "hessians": "tg.hessian",
    "map_fn": "tg.vmap",
    "vectorized_map": "tg.vmap",
    "foldl": "tg.scan",
    "py_function": "tg.primitive",
    "numpy_function": "tg.primitive",
    "name_scope": "tg.memory.scope",
    "keras": "tg.nn and tg.optim",
    "train": "tg.optim",
    "losses": "tg.nn.functional",
    "initializers": "tg.nn.initializers",
    "Module": "tg.nn.Layer",
    "SparseTensor": "tg.sparse.coo",
    "math": "the function itself: tg.exp",
    "cond": "Python's if, or tg.where",
    "case": "tg.select",
    "batch_gather": "tg.gather_nd",
    "TensorSpec": "an array",
    "switch_case": "Python's if, or tg.select",
    "batch_jacobian": "tg.vmap(tg.jacobian(f))",
    "executing_eagerly": "True: all but the inside of a tg.function runs eagerly",
    "UnconnectedGradients": 'tape.gradient(y, x, unconnected_gradients="zero")',
    "debugging": "Python's assert",
    "sequence_mask": "tg.arange(n) < tg.expand_dims(lengths, -1)",
    "bitcast": "x.numpy().view(dtype)",
    "foldr": "tg.scan(f, init, xs, reverse=True)",
    "realdiv": "tg.divide",
    "parallel_stack": "tg.stack",
    "dynamic_partition": "x[mask]",
    "histogram_fixed_width": "tg.histogram",
    "ensure_shape": "assert x.shape == shape",
    "TensorShape": "a tuple",
    "DType": "x.dtype, which is NumPy's",
    "as_dtype": "x.dtype, which is NumPy's",
    "control_dependencies": "nothing: operations run in the order of the program",
    "no_gradient": "tg.stop_gradient",
    "metrics": "tg.training",
    "callbacks": "tg.training",
    "data": "tg.training.DataLoader",
    "layers": "tg.nn",
    "optimizers": "tg.optim",
    "unique_with_counts": "tg.unique_counts",
    # PyTorch
    "no_grad": "nothing: only a tape's block is recorded; in it, tape.stop_recording() or tg.stop_gradient(x)",
    "inference_mode": "nothing: only a tape's block is recorded",
    "enable_grad": "with tg.GradientTape() as tape:",
    "set_grad_enabled": "with tape.stop_recording():",
    "autograd": "tg.GradientTape, or tg.grad(f)",
    "func": "tg.grad, tg.vmap",
    "cuda": 'with tg.device("cuda"):, or x.to_device("cuda")',
    "manual_seed": "tg.random.seed",
    "rand": "tg.random.uniform",
    "randn": "tg.random.normal",
    "randperm": "tg.random.permutation",
    "from_numpy": "tg.asarray(x, copy=False)",
    "FloatTensor": 'tg.asarray(x, dtype="float32")',
    "LongTensor": 'tg.asarray(x, dtype="int64")',
    "cat": "tg.concat",
    "unsqueeze": "tg.expand_dims",
    "permute": "tg.permute_dims",
    "mm": "tg.matmul",
    "bmm": "tg.matmul",
    "mv": "tg.matvec",
    "chunk": "tg.array_split",
    "index_select": "tg.take(x, indices, axis)",
    "masked_fill": "tg.where(mask, value, x)",
    "masked_select": "x[mask]",
    "scatter": "tg.put_along_axis",
    "clamp": "tg.clip",
    "float": "tg.float32",
    "double": "tg.float64",
    "half": "tg.float16",
    "int": "tg.int32",
    "long": "tg.int64",
    "short": "tg.int16",
    "is_tensor": "isinstance(x, tg.Tensor)",
    "numel": "tg.size",
    "sub": "tg.subtract",
    "div": "tg.divide",
    "mul": "tg.multiply",
    "neg": "tg.negative",
    "eq": "tg.equal",
    "ne": "tg.not_equal",
    "lt": "tg.less",
    "le": "tg.less_equal",
    "gt": "tg.greater",
    "ge": "tg.greater_equal",
    "detach": "tg.stop_gradient",
    "compile": "tg.function",
    "amp": "tg.autocast, and tg.optim.LossScaler for amp.GradScaler",
    "Linear": "tg.nn.Dense",
    "Size": "a tuple",
    "save": "model.save(path), or tg.distributed.save(folder, tree)",
    "utils": "tg.recompute_grad for utils.checkpoint",
    "load": "model.load(path), or tg.distributed.load(folder, tree)",
    "view": "tg.reshape",
    "as_tensor": "tg.asarray",
    "clone": "x.copy()",
    "movedim": "tg.moveaxis",
    "narrow": "x[start:stop]",
    "unbind": "tg.unstack",
    "tensor_split": "tg.array_split",
    "repeat_interleave": "tg.repeat",
    "take_along_dim": "tg.take_along_axis",
    "bucketize": "tg.searchsorted",
    "trapz": "tg.trapezoid",
    "pinverse": "tg.linalg.pinv",
    "ger": "tg.outer",
    "addmm": "b + x @ y",
    "baddbmm": "b + x @ y",
    "rand_like": "tg.random.uniform(tg.shape(x))",
    "randn_like": "tg.random.normal(tg.shape(x))",
    "is_grad_enabled": "nothing: only a tape's block is recorded",
    "profiler": "tapegrad profile program.py in a shell",
    "flatten": "x.flatten()",
    # JAX, NumPy, CuPy
    "jit": "tg.function",
    "lax": "tg.scan, tg.fori_loop and tg.while_loop",
    "numpy": "the function itself: tg.sum",
    "checkpoint": "tg.recompute_grad",
    "remat": "tg.recompute_grad",
    "jacrev": "tg.jacobian",
    "custom_vjp": "tg.custom_gradient",
    "custom_jvp": "tg.primitive, and its defjvp",
    "pmap": "tg.distributed",
    "tree_util": "nothing: tapes, grad and vmap take nested structures",
    "tree_map": "a comprehension: tapes, grad and vmap take nested structures",
    "named_scope": "tg.memory.scope",
    "disable_jit": "TAPEGRAD_FUNCTION=0 in the environment",
    "enable_x64": 'dtype="float64" where a value is made',
    "scipy": "tg.linalg, tg.special, tg.stats, tg.signal, tg.integrate, tg.sparse",
    "linear_transpose": "tg.vjp",
    "device_put": "x.to_device(device)",
    "device_get": "x.numpy()",
    "make_jaxpr": "tg.explain",
    "eval_shape": "tg.memory.predict_peak",
    "block_until_ready": "x.numpy(), which waits",
    "make_vjp": "tg.vjp",
    "elementwise_grad": "tg.grad of the sum",
    "grad_and_value": "tg.value_and_grad",
    "ndarray": "tg.Tensor",
    "asnumpy": "x.numpy()",
    "RawKernel": "tg.primitive",
    "ElementwiseKernel": "tg.primitive",
    "fuse": "nothing: elementwise operations are fused by themselves",
}
"""Attributes of the package."""

TENSORS = {
    "backward": "with tg.GradientTape() as tape: ... tape.gradient(loss, sources), or tg.grad(f)",
    "grad": "tape.gradient(loss, this): a tensor has no gradient of its own",
    "requires_grad": "tape.watch(x), or make it a tg.Variable",
    "requires_grad_": "tape.watch(x), or make it a tg.Variable",
    "grad_fn": "nothing: tapes record operations, tensors do not",
    "is_leaf": "nothing: tapes record operations",
    "retain_grad": "tape.gradient(loss, this), which gives the gradient of any value",
    "detach": "tg.stop_gradient(x)",
    "data": "x.numpy(), or tg.stop_gradient(x)",
    "cpu": 'x.to_device("cpu")',
    "cuda": 'x.to_device("cuda")',
    "to": "x.to_device(device), or x.astype(dtype)",
    "get": "x.numpy()",
    "type": "x.astype(dtype)",
    "float": 'x.astype("float32")',
    "double": 'x.astype("float64")',
    "half": 'x.astype("float16")',
    "bfloat16": 'x.astype("bfloat16")',
    "long": 'x.astype("int64")',
    "int": 'x.astype("int32")',
    "bool": 'x.astype("bool")',
    "view": "x.reshape(shape)",
    "view_as": "x.reshape(y.shape)",
    "permute": "x.transpose(*axes)",
    "unsqueeze": "tg.expand_dims(x, axis)",
    "expand": "tg.broadcast_to(x, shape)",
    "numel": "x.size",
    "dim": "x.ndim",
    "contiguous": "x itself: how it lies is no concern",
    "clone": "x.copy()",
    "t": "x.T",
    "H": "x.mT.conj()",
    "clamp": "x.clip",
    "masked_fill": "tg.where(mask, value, x)",
    "gather": "tg.take_along_axis(x, indices, axis)",
    "index_select": "x.take(indices, axis)",
    "eval": "x.numpy()",
    "get_shape": "x.shape",
    "block_until_ready": "x.numpy(), which waits",
    "mm": "x @ y",
    "bmm": "x @ y",
    "sub": "x - y",
    "mul": "x * y",
    "div": "x / y",
    "neg": "-x",
    "pow": "x ** y",
    "norm": "tg.linalg.norm(x)",
    "itemsize": "x.dtype.itemsize",
    "fill": "tg.full_like(x, value)",
    "sort": "tg.sort(x)",
    "put": "tg.put(x, places, values)",
    "assign": "x.at[index].set(values), which makes a new tensor; a tg.Variable has assign",
    "assign_add": "x + y; a tg.Variable has assign_add",
    "assign_sub": "x - y; a tg.Variable has assign_sub",
    "load": "v.assign(value)",
    "initialized_value": "v.value()",
    "set_shape": "x.reshape(shape)",
    "is_initialized": "True: a variable always has a value",
    "initializer": "v.assign(value)",
    "experimental_ref": "x.ref()",
    "graph": "nothing: tapes record operations, tensors do not",
    "op": "nothing: tapes record operations, tensors do not",
    "register_hook": "tg.custom_gradient",
    "stop_gradient": "tg.stop_gradient(x)",
    "indices": "tg.nonzero(x); the gradient of a gather is a tg.IndexedSlices where it is asked for: "
    "tg.take(x, indices, axis=0, sparse_grad=True), nn.Embedding(..., sparse=True), v.sparse_read(indices)",
    "values": "x itself; the gradient of a gather is a tg.IndexedSlices where it is asked for: "
    "tg.take(x, indices, axis=0, sparse_grad=True), nn.Embedding(..., sparse=True), v.sparse_read(indices)",
    "dense_shape": "x.shape",
}
"""Attributes of tensors and variables."""

MODULES = {
    "nn": {
        "Linear": "tg.nn.Dense",
        "Module": "tg.nn.Layer",
        "Model": "tg.nn.Layer",
        "Parameter": "tg.Variable",
        "ModuleList": "a list in an attribute of a layer",
        "AvgPool2d": "tg.nn.AveragePooling2D",
        "BatchNorm1d": "tg.nn.BatchNormalization",
        "BatchNorm2d": "tg.nn.BatchNormalization",
        "LayerNorm": "tg.nn.LayerNormalization",
        "MaxPooling1D": "tg.nn.MaxPool1D",
        "MaxPooling2D": "tg.nn.MaxPool2D",
        "MaxPooling3D": "tg.nn.MaxPool3D",
        "AvgPool1d": "tg.nn.AveragePooling1D",
        "AvgPool3d": "tg.nn.AveragePooling3D",
        "GlobalMaxPool1D": "tg.nn.GlobalMaxPooling1D",
        "GlobalMaxPool2D": "tg.nn.GlobalMaxPooling2D",
        "GlobalAvgPool1D": "tg.nn.GlobalAveragePooling1D",
        "GlobalAvgPool2D": "tg.nn.GlobalAveragePooling2D",
        "AdaptiveAvgPool2d": "tg.nn.GlobalAveragePooling2D, or tg.nn.functional.adaptive_avg_pool2d",
        "BatchNorm": "tg.nn.BatchNormalization",
        "BatchNorm3d": "tg.nn.BatchNormalization",
        "GroupNorm": "tg.nn.GroupNormalization",
        "RNN": "tg.nn.SimpleRNN",
        "Sigmoid": 'tg.nn.Activation("sigmoid")',
        "Tanh": 'tg.nn.Activation("tanh")',
        "GELU": 'tg.nn.Activation("gelu")',
        "SiLU": 'tg.nn.Activation("silu")',
        "Identity": "tg.nn.Lambda(lambda x: x)",
        "Concatenate": "tg.concat",
        "ZeroPadding2D": "tg.pad",
        "Upsample": "tg.nn.functional.interpolate",
        "UpSampling2D": "tg.nn.functional.interpolate",
        "Conv2DTranspose": "tg.nn.functional.conv_transpose2d",
        "AvgPool1D": "tg.nn.AveragePooling1D",
        "AvgPool2D": "tg.nn.AveragePooling2D",
        "AvgPool3D": "tg.nn.AveragePooling3D",
        "LSTMCell": "tg.nn.LSTM",
        "GRUCell": "tg.nn.GRU",
        "RNNCell": "tg.nn.SimpleRNN",
        "Swish": 'tg.nn.Activation("silu")',
        "Attention": "tg.nn.functional.scaled_dot_product_attention",
        "BCELoss": "tg.nn.functional.binary_cross_entropy",
        "KLDivLoss": "tg.nn.functional.kl_div",
        "Add": "x + y",
        "Multiply": "x * y",
        "Input": "nothing: the first input tells layers their shapes",
        "ModuleDict": "a dict in an attribute of a layer",
        "GaussianNoise": "x + tg.random.normal(tg.shape(x))",
        "DepthwiseConv2D": "tg.nn.Conv2D(filters, size, groups=channels)",
        "CrossEntropyLoss": "tg.nn.functional.cross_entropy",
        "BCEWithLogitsLoss": "tg.nn.functional.binary_cross_entropy_with_logits",
        "softmax_cross_entropy_with_logits": "tg.cross_entropy",
        "sparse_softmax_cross_entropy_with_logits": "tg.cross_entropy",
        "sigmoid_cross_entropy_with_logits": "tg.nn.functional.binary_cross_entropy_with_logits",
        "max_pool": "tg.nn.functional.max_pool2d",
        "avg_pool": "tg.nn.functional.avg_pool2d",
        "bias_add": "x + bias",
        "l2_normalize": "tg.nn.functional.normalize",
        "l2_loss": "tg.sum(x ** 2) / 2",
        "embedding_lookup": "tg.take(table, ids, axis=0)",
        "moments": "tg.mean and tg.var",
    },
    "random": {
        "rand": "tg.random.uniform",
        "random": "tg.random.uniform",
        "randn": "tg.random.normal",
        "shuffle": "tg.random.permutation",
        "set_seed": "tg.random.seed",
        "manual_seed": "tg.random.seed",
        "default_rng": "tg.random.Generator",
        "RandomState": "tg.random.Generator",
        "PRNGKey": "tg.random.Generator",
        "key": "tg.random.Generator",
        "split": "tg.random.Generator, which goes on by itself",
    },
    "optim": {
        "incremental_update": "tg.optim.EMA",
        "ExponentialMovingAverage": "tg.optim.EMA",
        "swa_utils": "tg.optim.EMA",
        "global_norm": "tg.optim.clip_by_global_norm, which gives the norm, too",
        "clip": "tg.optim.clip_by_value",
        **dict.fromkeys(
            ("Adadelta", "Adafactor", "Adamax", "Ftrl", "Muon", "Nadam", "RAdam", "Rprop"),
            "tg.optim.Adam, or a subclass of tg.optim.Optimizer",
        ),
        "SparseAdam": "tg.optim.LazyAdam",
        "MultiSteps": "gradient_accumulation_steps=, which every optimizer takes",
        "chain": "what is to be done to gradients as arguments of the optimizer: clipnorm=, weight_decay=",
        "LossScaleOptimizer": "tg.optim.LossScaler(optimizer)",
        "constant_schedule": "tg.optim.schedules.Constant",
        "cosine_decay_schedule": "tg.optim.schedules.CosineDecay",
        "exponential_decay": "tg.optim.schedules.ExponentialDecay",
        "piecewise_constant_schedule": "tg.optim.schedules.PiecewiseConstantDecay",
        "polynomial_schedule": "tg.optim.schedules.PolynomialDecay",
        "linear_schedule": "tg.optim.schedules.PolynomialDecay",
        "sgdr_schedule": "tg.optim.schedules.CosineDecayRestarts",
        "join_schedules": "tg.optim.schedules.JoinedSchedules",
        "warmup_constant_schedule": "tg.optim.schedules.LinearWarmup",
        "warmup_cosine_decay_schedule": "tg.optim.schedules.CosineDecay, with warmup_target= and warmup_steps=",
        "lr_scheduler": "tg.optim.schedules",
        "apply_updates": "opt.apply_gradients(zip(gradients, variables))",
    },
    "optim.schedules": {
        "CosineAnnealingLR": "tg.optim.schedules.CosineDecay",
        "CosineAnnealingWarmRestarts": "tg.optim.schedules.CosineDecayRestarts",
        "ConstantLR": "tg.optim.schedules.Constant",
        "ExponentialLR": "tg.optim.schedules.ExponentialDecay",
        "LinearLR": "tg.optim.schedules.LinearWarmup, or PolynomialDecay",
        "MultiStepLR": "tg.optim.schedules.PiecewiseConstantDecay",
        "PolynomialLR": "tg.optim.schedules.PolynomialDecay",
        "SequentialLR": "tg.optim.schedules.JoinedSchedules",
        "StepLR": "tg.optim.schedules.ExponentialDecay(rate, step_size, gamma, staircase=True)",
        "LambdaLR": "learning_rate=f: any function of the number of steps is a schedule",
        "ReduceLROnPlateau": "opt.learning_rate = value in a tg.training.Callback",
        "LearningRateSchedule": "a function of the number of steps",
    },
    "training": {
        "ModelCheckpoint": "tg.training.Checkpoint",
        "BackupAndRestore": "tg.training.Checkpoint",
        "LearningRateScheduler": "learning_rate=tg.optim.schedules.CosineDecay(...), say",
        "ReduceLROnPlateau": "opt.learning_rate = value in a tg.training.Callback",
        "LambdaCallback": "a subclass of tg.training.Callback",
        "ProgbarLogger": "tg.training.ProgressBar",
        "TensorBoard": "tg.training.CSVLogger",
        "Dataset": "any class with __len__ and __getitem__",
        "TensorDataset": "tg.training.DataLoader((x, y))",
        "random_split": "tg.random.permutation, and x[indices]",
        "Precision": "tg.training.ConfusionMatrix.precision",
        "Recall": "tg.training.ConfusionMatrix.recall",
        "F1Score": "tg.training.ConfusionMatrix, whose precision() and recall() it is made of",
        "AUROC": "tg.training.AUC",
        "MulticlassAccuracy": "tg.training.SparseCategoricalAccuracy",
    },
}
"""Attributes of public modules."""

LAYERS = {
    "parameters": "model.trainable_variables",
    "weights": "model.variables",
    "trainable_weights": "model.trainable_variables",
    "forward": "model(x), and define call",
    "train": "model(x, training=True)",
    "eval": "model(x)",
    "save_weights": "model.save(path)",
    "load_weights": "model.load(path)",
    "children": "model.layers",
    "to": "with tg.device(name): around what makes the model",
    "cuda": 'with tg.device("cuda"): around what makes the model',
    "zero_grad": "nothing: each tape.gradient gives new gradients",
    "requires_grad_": "layer.trainable = False",
    "get_weights": "[v.numpy() for v in model.variables]",
    "apply": "model(x)",
    "init": "model(x), which makes the weights",
    "fit": "tg.training.fit(step, data, epochs), where step takes a batch: tape.gradient, then opt.apply_gradients",
    "evaluate": "tg.training.Mean and other metrics over the batches",
    "predict": "model(x)",
    "compile": "tg.function around the training step",
    "named_parameters": "{v.name: v for v in model.trainable_variables}",
}
"""Attributes of layers."""

OPTIMIZERS = {
    "zero_grad": "nothing: each tape.gradient gives new gradients",
    "step": "opt.apply_gradients(zip(gradients, variables))",
    "minimize": "tape.gradient, then opt.apply_gradients",
    "param_groups": "opt.learning_rate = value",
    "lr": "opt.learning_rate",
    "init": "opt.build(variables)",
    "save": 'tg.distributed.save(folder, {"model": model, "optimizer": opt})',
    "load": 'tg.distributed.load(folder, {"model": model, "optimizer": opt})',
    "get_weights": "[v.numpy() for v in opt.variables]",
}
"""Attributes of optimizers."""

KEYWORDS = (
    ("axis", "dim", "dims", "reduction_indices"), ("keepdims", "keepdim", "keep_dims"), ("shape", "size"),
    ("mean", "loc"), ("std", "scale"),
    ("learning_rate", "lr"), ("strides", "stride"), ("use_bias", "bias"), ("epsilon", "eps"), ("beta_1", "b1"),
    ("beta_2", "b2"), ("units", "out_features"), ("filters", "out_channels"), ("dilation_rate", "dilation"),
    ("rate", "p"), ("input_dim", "num_embeddings"), ("output_dim", "embedding_dim"),
    ("pool_size", "kernel_size"), ("in_axes", "in_dims"), ("out_axes", "out_dims"), ("num_heads", "heads"),
    ("weight_decay", "decay"), ("workers", "num_workers"), ("collate", "collate_fn"), ("prefetch", "prefetch_factor"),
    ("validate", "validation_data"),
)  # fmt: skip
"""Names of one argument; a function has one of each at most."""

OTHER_KEYWORDS = {
    "requires_grad": "watch the tensor on a tape, tape.watch(x), or make it a tg.Variable",
    "betas": "write beta_1= and beta_2=",
    "unbiased": "write correction=1 for True, correction=0 for False",
    "in_features": "leave it out: the first input tells",
    "in_channels": "leave it out: the first input tells",
    "out": "leave it out: results are new tensors",
    "params": "leave it out: opt.apply_gradients takes the variables",
    "data_format": "leave it out: channels come first, (n, c, h, w); tg.permute_dims(x, (0, 3, 1, 2)) puts them there",
    "validate_shape": "leave it out: the shape of a variable never changes",
    "constraint": "leave it out, and assign what the constraint gives: v.assign(tg.clip(v, 0, 1))",
    "caching_device": "leave it out: a value is read where it lies",
    "synchronization": "leave it out: see tg.distributed",
    "aggregation": "leave it out: see tg.distributed",
    "parameters": "leave it out: opt.apply_gradients takes the variables",
    "pin_memory": "leave it out: batches are sent ahead to device=",
    "persistent_workers": "leave it out: workers live for an epoch",
    "sampler": "data whose [i] gives the example that is to come at i",
}
"""Arguments that no function here has."""

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = {_PACKAGE, "numpy", "scipy", "ml_dtypes", "cupy", "cupyx", "cupy_backends"}
_HOMES = (
    "linalg", "nn", "nn.functional", "optim", "random", "special", "fft", "signal", "stats", "sparse", "memory",
    "distributed", "training",
)  # fmt: skip


def missing_from_package(name: str) -> str:
    """What to add to the message that the package has no attribute ``name``; empty if nothing is known of it."""
    advice = "" if name.startswith("_") else NAMES.get(name) or _elsewhere(name)
    return f"; write {advice}" if advice else ""


def _missing_from_module(module: str, name: str) -> NoReturn:
    """Raise the error for an attribute that a public module lacks."""
    home, message = module.partition(".")[2], f"module {module!r} has no attribute {name!r}"
    if not name.startswith("_"):
        top = f"tg.{name}" if name in _all_of(_public()) else ""
        advice = MODULES.get(home, {}).get(name) or top or _elsewhere(name) or _alike(home, name) or NAMES.get(name)
        message = f"{message}; write {advice}" if advice else message
    raise AttributeError(message, name=name, obj=sys.modules[module])


def _elsewhere(name: str) -> str:
    """Where ``name`` stands in a public module; empty if nowhere."""
    if not _all_of(_public()):
        return ""
    home = next((home for home in _HOMES if name in _all_of(_public(*home.split(".")))), None)
    return "" if home is None else f"tg.{home}.{name}"


def _alike(home: str, name: str) -> str:
    """A name of the module that differs in capitals and underscores alone; for a layer also that of a function."""
    plain = name.replace("_", "").lower()
    homes = (home, "nn.functional") if home == "nn" else (home,)
    for wanted in dict.fromkeys((plain, re.sub(r"[123]d$", "", plain))):
        for where in homes:
            for known in _all_of(_public(*where.split("."))):
                if known.replace("_", "").lower() == wanted:
                    return f"tg.{where}.{known}"
    return ""


def _all_of(module: Any) -> Collection[str]:
    """The public names of a module; none of the package while they are being loaded."""
    return getattr(module, "__dict__", {}).get("__all__", ())


def missing(owner: object, name: str, table: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that ``owner`` lacks."""
    message, advice = f"{type(owner).__name__!r} object has no attribute {name!r}", table.get(name, "")
    if not advice:
        inside = _inside(owner, name)
        if inside is not None:
            return inside
        if table is TENSORS and not name.startswith("_"):
            advice = _of_tensors(name)
    return AttributeError(f"{message}; write {advice}" if advice else message, name=name, obj=owner)


def _inside(owner: object, name: str) -> AttributeError | None:
    """What went wrong in a property of that ``name``: Python asks ``__getattr__`` then, and the cause would be lost."""
    found = getattr(type(owner), name, None)
    if isinstance(found, (property, functools.cached_property)):
        try:
            found.__get__(owner)
        except AttributeError as error:
            return error
    return None


def _of_tensors(name: str) -> str:
    """What stands in place of a method ``name`` of tensors."""
    if name.endswith("_"):
        return "x = x + y, say: tensors do not change in place; a tg.Variable changes by assign"
    if inspect.isroutine(getattr(_public(), name, None)):
        return f"tg.{name}(x)"
    return NAMES.get(name) or _elsewhere(name)


def _public(*home: str) -> Any:
    """The package, or what stands in it under a name."""
    owner: Any = sys.modules[_PACKAGE]
    for part in home:
        owner = getattr(owner, part, None)
    return owner


def open_to_users(namespace: dict[str, Any], module: str) -> None:
    """Let a module list its public names alone (``dir``), and explain names that it lacks."""
    namespace.setdefault("__getattr__", functools.partial(_missing_from_module, module))
    namespace["__dir__"] = lambda: sorted({*namespace["__all__"], *(name for name in namespace if name[:2] == "__")})


def explain(namespace: dict[str, Any], module: str) -> None:
    """The same, and let its public functions, known to pickle as ``module``'s, explain errors in their arguments.

    What users call is meant: modules of the package import from each other what is not wrapped.
    """
    open_to_users(namespace, module)
    known: dict[object, object] = {}
    for name in sorted(namespace["__all__"], key=lambda name: name != getattr(namespace[name], "__name__", "")):
        f = namespace[name]  # aliases come last
        if inspect.isfunction(f) and not _takes_operands_alone(f):
            namespace[name] = known.setdefault(f, explained(f, name, module))


def _takes_operands_alone(f: Callable[..., Any]) -> bool:
    """Whether it is elementwise, or a product of two arrays: these run most often, and name themselves in errors."""
    return hasattr(f, "primitive") or [*inspect.signature(f).parameters] == ["x1", "x2"]


def explained(f: Callable[..., Any], name: str, module: str = _PACKAGE) -> Callable[..., Any]:
    """``f``, whose errors for arguments name it: those under another library's name, and those that it cannot use."""

    @functools.wraps(f)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except TapegradError:
            raise
        except (TypeError, ValueError, AttributeError, IndexError, KeyError, OverflowError) as error:
            if isinstance(error, TypeError):
                refuse(name, f, kwargs)
            if _comes_from_inside(error):
                raise ArgumentError(_unusable(name, f, args, kwargs, error)) from error
            raise

    public.__module__, public.__qualname__, public.__name__ = module, name, name  # by which pickle finds it
    return public


def called_inside(outer: CodeType) -> str:
    """Return the name of the public function that ``outer`` runs; none where the user's own code runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outer and _is_inside(frame):
        if frame.f_code.co_name == "public" and frame.f_globals is globals():
            return str(frame.f_locals["name"])
        frame = frame.f_back
    return ""


def _is_inside(frame: FrameType) -> bool:
    """Whether it runs code of this package, or of a library that this package calls."""
    home = str(frame.f_globals.get("__name__")).partition(".")[0]
    return home in _LIBRARIES or home in sys.stdlib_module_names


def _comes_from_inside(error: Exception) -> bool:
    """Whether Python or a library raised it on behalf of this package: no code of the user's ran in between.

    What the call itself raises (a missing argument), and what this package raises, says what is wrong already.
    """
    last = None
    tb = error.__traceback__.tb_next if error.__traceback__ is not None else None  # the wrapper's own frame comes first
    while tb is not None:
        if not _is_inside(tb.tb_frame):
            return False
        last, tb = tb, tb.tb_next
    if last is None:
        return False
    raised = last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return not (raised and str(last.tb_frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE)


def _unusable(
    name: str, f: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object], error: Exception
) -> str:
    """The message for arguments that ``f`` cannot use."""
    try:
        given = inspect.signature(f).bind(*args, **kwargs).arguments
    except TypeError as lacking:  # a decorator's signature has refused them first
        return f"{name}: {lacking}; see help({name}) for what it takes"
    shown = ", ".join(f"{argument}={_kind(x)}" for argument, x in given.items())
    return f"{name}: cannot be called with {shown}: {error or type(error).__name__}; see help({name}) for what it takes"


def _kind(x: object) -> str:
    """A number or string as it is; anything else by its type and shape, without its values."""
    if isinstance(x, (str, bytes, int, float, complex, type(None))):
        return f"{x!r:.40}"
    if isinstance(x, (tuple, list)) and len(x) <= 4:
        items = ", ".join(map(_kind, x))
        return f"[{items}]" if isinstance(x, list) else f"({items})"
    shape = getattr(x, "shape", None)
    return type(x).__name__ + (f" of shape {shape}" if isinstance(shape, tuple) else "")


def refuse(name: str, f: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Raise TypeError for the first of the arguments ``given`` by name that ``f`` lacks and other libraries have."""
    _refuse(name, given, inspect.signature(f).parameters)


class Named:
    """Base of public classes, whose constructors explain arguments under another library's names.

    It is a base because ``inspect.signature`` shows ``__init__`` only if the class has no ``__new__`` of its own.
    """

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """An object to be initialized.  Raises TypeError for arguments under another library's names."""
        refuse_in(cls, kwargs)
        return super().__new__(cls)


def refuse_in(cls: type, given: Mapping[str, object]) -> None:
    """The same of a class of ours: what ``__init__`` takes as ``**options`` goes to that of the base."""
    if given and (known := taken_by(cls)) is not None:
        _refuse(cls.__name__, given, known)


@functools.lru_cache(1024)
def taken_by(cls: type) -> Mapping[str, inspect.Parameter] | None:
    """Arguments of a class; None if one of a user's takes what it likes."""
    known: dict[str, inspect.Parameter] = {}
    for f in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        parameters = inspect.signature(f).parameters
        known |= {name: p for name, p in parameters.items() if name not in known}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
        if f.__module__.partition(".")[0] != _PACKAGE:
            return None
    return known


def _refuse(name: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    for keyword in given.keys() - known.keys():
        same = next((group for group in KEYWORDS if keyword in group), ())
        advice = next((f"write {other}=" for other in same if other in known), OTHER_KEYWORDS.get(keyword))
        if advice is not None:
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}; {advice}") from None


def has_other_names(f: object) -> bool:
    """Whether ``f`` is a function with an argument that other libraries call otherwise."""
    if not inspect.isfunction(f) or hasattr(f, "primitive"):  # an elementwise operation runs too often
        return False
    names = set(inspect.signature(f).parameters)
    return any(not names.isdisjoint(group) for group in KEYWORDS) or {"dtype", "device"} <= names
