"""PyTorch's side of ``fusion.py``: the same block, counted in eager mode and as torch.compile schedules it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fusion_block as block


def collect(
    sizes: Any, rate: float, lengths: Sequence[int], counts: dict, saved: dict, notes: list[str], want: list[Any]
) -> None:
    """Add PyTorch's counts, where it is installed; ``want``: our results without dropout."""
    try:
        import torch
    except ImportError:
        notes.append("torch: not installed")
        return
    import tapegrad as tg

    with tg.device("cpu"):
        model, x, ct = block.ours(tg, sizes, 0.0)
        leaves = [torch.tensor(t.numpy()).requires_grad_() for t in (x, *block.weights_of(model))]
    ct = torch.tensor(ct.numpy())
    names = f"torch {torch.__version__} eager", f"torch {torch.__version__} compile"
    for name, counted in zip(names, (_eager, _compiled)):
        counts[name] = counted(torch, sizes, rate, leaves, ct)
        plain = with_torch(torch, sizes, 0.0, leaves, ct, compiled=counted is _compiled)
        worst = block.agree(name, [t.detach().numpy() for t in plain()], want)
        notes.append(f"{name}, dropout 0: worst difference from tapegrad {worst:.0e}")
    saved[names[0]] = {k: arrays_saved(torch, k, compiled=False) for k in lengths}
    saved[names[1]] = {k: arrays_saved(torch, k, compiled=True) for k in lengths}


def with_torch(
    torch: Any, sizes: Any, rate: float, leaves: list[Any], ct: Any, *, compiled: bool = False
) -> Callable[[], list[Any]]:
    """A function that gives the block's result and the gradients of ``leaves``."""
    functional = torch.nn.functional
    b, t, width, heads = sizes.batch, sizes.context, sizes.width, sizes.heads
    place = {name: i for i, name in enumerate(block.WEIGHTS)}

    def forward(x: Any, *weights: Any) -> Any:
        w = lambda name: weights[place[name]]

        def norm(x: Any, name: str) -> Any:
            return functional.layer_norm(x, (width,), w(f"{name}.gamma"), w(f"{name}.beta"), 1e-5)

        def dense(x: Any, name: str) -> Any:
            return torch.addmm(w(f"{name}.bias"), x.reshape(b * t, -1), w(f"{name}.kernel")).view(b, t, -1)

        def dropout(x: Any) -> Any:
            return torch.native_dropout(x, rate, True)[0] if rate else x

        n = norm(x, "norm_1")
        q, k, v = (dense(n, part).view(b, t, heads, -1).transpose(1, 2) for part in ("query", "key", "value"))
        attended = dropout(torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1)) @ v
        x = x + dropout(dense(attended.transpose(1, 2).reshape(b, t, width), "output"))
        return x + dropout(dense(functional.gelu(dense(norm(x, "norm_2"), "expand")), "contract"))

    if compiled:
        forward = torch.compile(forward)

    def call() -> list[Any]:
        y = forward(*leaves)
        return [y, *torch.autograd.grad(y, leaves, ct)]

    return call


def _eager(torch: Any, sizes: Any, rate: float, leaves: list[Any], ct: Any) -> Any:
    from fusion import Count
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    rows: list[tuple[str, int, int]] = []

    def extent(t: Any) -> int:
        """Bytes of a tensor's elements, what broadcasting repeats counted once."""
        found = t.element_size()
        for n, stride in zip(t.shape, t.stride()):
            found *= n if stride else 1
        return found

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            written = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
            memory = {t.untyped_storage().data_ptr() for t in read.values()}
            views = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in memory for t in written)
            if written and not views and "empty" not in func.__name__:
                rows.append((str(func), sum(map(extent, read.values())), sum(map(extent, written))))
            return found

    call = with_torch(torch, sizes, rate, leaves, ct)
    with Counter():
        call()
    return Count(len(rows), sum(read + written for _, read, written in rows), rows)


@contextmanager
def _schedules(torch: Any) -> Iterator[list[Any]]:
    """The final schedule of each graph that is compiled in the block: its nodes and the bytes Inductor says they move.

    Inductor counts bytes only where its log of metrics is on; it is heard by nobody here.
    """
    from torch._inductor.compile_fx import inductor_metrics_log as log
    from torch._inductor.graph import GraphLowering

    seen: list[Any] = []
    counting, level, propagate = GraphLowering.count_bytes, log.level, log.propagate

    def spy(self: Any) -> Any:
        found = counting(self)
        seen.extend(self.scheduler.nodes)
        return found

    torch._dynamo.reset()
    GraphLowering.count_bytes = spy
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        with warnings.catch_warnings(), torch._inductor.config.patch(force_disable_caches=True):
            warnings.simplefilter("ignore")
            yield seen
    finally:
        GraphLowering.count_bytes = counting
        log.setLevel(level)
        log.propagate = propagate


def _compiled(torch: Any, sizes: Any, rate: float, leaves: list[Any], ct: Any) -> Any:
    """Kernels: fused ones and products of the final schedules; views and allocations are neither."""
    import torch._inductor.metrics as metrics
    from fusion import Count

    metrics.reset()
    with _schedules(torch) as nodes:
        with_torch(torch, sizes, rate, leaves, ct, compiled=True)()
    rows = []
    for node in nodes:
        nbytes = node.get_read_write_buffers_sizes()
        if node.is_extern():
            kernel = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
            rows.append((f"{kernel} (read and written)", 0, nbytes))
        elif nbytes:
            origins = [part.node.get_origin_node() for part in node.get_nodes()]
            names = " ".join(str(origin) for origin in origins if origin is not None)
            rows.append((f"fused {names} (read and written)", 0, nbytes))
    return Count(len(rows), metrics.num_bytes_accessed, rows)


def arrays_saved(torch: Any, steps: int, *, compiled: bool, elements: int = 1 << 16) -> int:
    """Distinct arrays that autograd keeps for ``steps`` times ``sin(y) * exp(y)``."""

    def chain(y: Any) -> Any:
        for _ in range(steps):
            y = torch.sin(y) * torch.exp(y)
        return y

    if compiled:
        torch._dynamo.reset()
        chain = torch.compile(chain, backend="aot_eager_decomp_partition")  # the partitioner decides, not the code
    kept: dict[int, Any] = {}

    def pack(t: Any) -> Any:
        if t.numel() == elements:
            kept[t.data_ptr()] = t
        return t

    x = torch.full((elements,), 0.1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chain(x)
    return len(kept)
