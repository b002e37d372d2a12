"""The backward walk: from cotangents of some values to cotangents of others, over a tape's records.

With ``lead`` (a length), every cotangent has one more leading axis: rows of a Jacobian.  A primitive whose parameters
can be lifted runs on all rows at once; the rule of another one is batched, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

from tapegrad.autodiff import derivative
from tapegrad.autodiff.batching import mapped
from tapegrad.autodiff.records import Applied, Called, Record
from tapegrad.autodiff.small_rules import listed
from tapegrad.autodiff.windows import Windows
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core import tracking
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.primitive import Elementwise
from tapegrad.core.protocols import Steps
from tapegrad.core.rule import Params, Plan, Rule, Sliced
from tapegrad.core.state import during, thread
from tapegrad.engine import region
from tapegrad.engine.realize import realize
from tapegrad.errors import GradientError, NoGradientError
from tapegrad.ops.dispatch import cast
from tapegrad.ops.elementwise.arithmetic import add
from tapegrad.ops.elementwise.complex import conj, real
from tapegrad.ops.index.slices import IndexedSlices, from_rule
from tapegrad.ops.shape.blocks import slice_p
from tapegrad.ops.shape.shape import sum_to
from tapegrad.tensor import Tensor, from_array, identity_p

_array, _aval, _buffer = attrgetter("array"), attrgetter("aval"), attrgetter("_buffer")
Cotangents = dict[int, Any]
"""Cotangents by node index: tensors, or where rules return some rows of them alone IndexedSlices, and of sliced values
Windows; of small values buffers, arrays that may become buffers, or plain arrays."""
_MOST_SUMS = 1024


def backward(
    records: list[Record],
    cts: Cotangents,
    keep: set[int],
    *,
    consume: bool,
    path: set[int] | None = None,
    lead: int | None = None,
    also: Iterable[Buffer] = (),
    forced: AbstractSet[int] = frozenset(),
    slices: bool = False,
) -> dict[int, Any]:
    """Walk ``records`` backwards from ``cts``; the cotangents of the values in ``keep``.

    ``consume``: records are dropped as they are used, so each residual is freed at its last use.  ``path``: the values
    that depend on the sources; only these are followed (None: all).  ``also``: what to evaluate along with the result.
    ``forced``: results of operations in which other processes take part, and which are pulled in any case.
    ``slices``: a cotangent of which some rows are known, the others being zeros, may come as IndexedSlices.
    Rules have the dtypes of what was recorded: no autocast is in force.
    """
    walk = tracking.current.walk
    return during(
        walk, _walk, records, cts, keep, consume, path, lead, also, forced, slices, deferring=[],
        walks=thread.walks + 1, autocasts=(),
    )  # fmt: skip


def _walk(
    records: list[Record],
    cts: Cotangents,
    keep: set[int],
    consume: bool,
    path: set[int] | None,
    lead: int | None,
    also: Iterable[Buffer],
    forced: AbstractSet[int],
    slices: bool,
) -> dict[int, Any]:
    differentiating = tracking.current.differentiating
    unseen = lead is None and not thread.recorders
    pull = thread.executor.pull
    for position in range(len(records) - 1, -1, -1):
        record = records.pop() if consume else records[position]
        if type(record) is Called:
            if record.results:
                differentiating(record.results[0].index)
            _pull_call(record, cts, keep, path, lead, forced)
            continue
        index = record.node.index
        ct = cts.pop(index, None)
        if ct is None:
            if index not in forced:
                continue
            ct = zeros_of(record.node.aval, lead)
        elif index in keep:
            cts[index] = ct
        if type(ct) is Windows:
            ct = ct.dense()
            if index in keep:
                cts[index] = ct
        if type(ct) is IndexedSlices:
            if record.node.prim is identity_p:  # a variable's reading, say
                source = record.inputs[0].index
                if path is None or source in path:
                    accumulate(cts, source, ct)
                continue
            ct = ct.to_dense()
        differentiating(index)
        if unseen and record.plan.quick and _pull_small(record, pull, ct, cts, path):
            del record, ct
            continue
        _pull(record, ct if type(ct) is Tensor else tensor_of(ct, record.node.aval), cts, path, lead)
        del record, ct
    found = {}
    for i in keep:
        ct = cts.get(i)
        if type(ct) is IndexedSlices and not slices:
            ct = cts[i] = ct.to_dense()
        if ct is not None:
            found[i] = ct if type(ct) is Tensor else sum_of(ct, None)
    realize([*[_buffer(g.values if type(g) is IndexedSlices else g) for g in found.values()], *also])
    return found


def sum_of(ct: object, aval: ShapedArray | None) -> Any:
    """A cotangent as a tensor, or as IndexedSlices if it is one."""
    return ct if type(ct) is IndexedSlices else tensor_of(ct, aval)


def tensor_of(ct: object, aval: ShapedArray | None) -> Tensor:
    """A cotangent as a tensor."""
    if type(ct) is Buffer:
        return Tensor(ct)
    if type(ct) is IndexedSlices:
        return ct.to_dense()
    if type(ct) is Windows:
        return ct.dense()
    return ct if type(ct) is Tensor else from_array(ct, None if aval is None else aval.device)


def _pull_small(record: Applied, pull: Callable[..., Any], ct: object, cts: Cotangents, path: set[int] | None) -> bool:
    """One small elementwise node, by the listed steps of its rules; False: they do not apply here."""
    inputs, plan = record.inputs, record.plan
    if path is not None and any(inputs[i].index not in path for i in plan.positions):
        return False
    steps = plan.steps or _listed(record.node, plan)
    if steps is None:
        return False
    kept = record.residuals  # what is restored is held by the call alone
    ct = ct._buffer if type(ct) is Tensor else ct
    gradients = pull(steps, ct, kept if isinstance(kept, tuple) else kept.restored())
    if gradients is None:
        return False
    for i, g in zip(plan.positions, gradients):
        index = inputs[i].index
        have = cts.get(index)
        if have is None:
            cts[index] = g
        elif type(have) is not type(g):
            cts[index] = add(tensor_of(have, record.node.aval), tensor_of(g, record.node.aval))
        elif type(g) is Buffer:
            cts[index] = _sum(pull, have, g)
        else:
            total = have + g
            cts[index] = total if g.ndim else record.node.aval.device.xp.asarray(total)
    return True


def _sum(pull: Callable[..., Any], have: Buffer, g: Buffer) -> Any:
    """Two cotangents added, by listed steps; as tensors where one is pending: it may be larger than what was pulled,
    which had no elements."""
    total = pull(_sum_of(g.node.aval, region.SMALL), have, (g,))
    return add(Tensor(have), Tensor(g)) if total is None else total[0]


@lru_cache(_MOST_SUMS)
def _sum_of(aval: ShapedArray, at_once: int) -> Steps:
    """The listed steps that add two cotangents, where arrays of fewer than ``at_once`` elements run at once."""
    steps = listed(lambda a, values: [a + values[0]], aval, (0,), [aval])
    assert steps is not None
    return steps


def _listed(node: Node, plan: Plan) -> Steps | None:
    site = node.site
    assert site is not None
    avals = [*site.avals, site.aval]

    def rules(seed: Tensor, values: dict[int, Tensor]) -> list[Tensor]:
        return [fit(apply_rule(node, r, i, seed, values, avals, node.params), avals[i]) for i, r in plan.pulls]

    plan.steps = listed(rules, node.aval, plan.slots, [avals[slot] for slot in plan.slots])
    plan.quick = plan.steps is not None
    return plan.steps


def _pull(record: Applied, ct: Tensor, cts: Cotangents, path: set[int] | None, lead: int | None) -> None:
    """Add the cotangents of one node's inputs to those in the walk."""
    node, inputs, plan, kept = record.node, record.inputs, record.plan, record.residuals
    residuals = kept if isinstance(kept, tuple) else kept.restored()  # under a budget they may have to be recomputed
    values = dict(zip(plan.slots, map(Tensor, residuals), strict=True))
    _arrays = list(map(_array, residuals))  # a budget evicts none of them meanwhile
    del residuals
    for i in plan.lacking:
        if path is None or inputs[i].index in path:
            raise NoGradientError(f"{node.prim.name}: has no gradient in operand {i} ({inputs[i].aval!r})")
    plain = [*map(_aval, inputs), node.aval]
    if node.prim is slice_p:
        _pull_window(record, ct, cts, path, lead)
        return
    if plan.pulls and plan.pulls[0][1].joint:
        _pull_jointly(record, ct, values, plain, cts, path, lead)
        return
    avals: list[ShapedArray] = []
    params: Params = {}
    for i, rule in plan.pulls:
        target = inputs[i]
        if path is not None and target.index not in path:
            continue
        if lead is None:
            g: Any = apply_rule(node, rule, i, ct, values, plain, node.params)
            g = from_rule(g) if type(g) is Sliced else fit(g, target.aval)
        elif node.prim.lift is not None or isinstance(node.prim, Elementwise):
            if not avals:  # once for all operands
                avals = [lifted(n.aval, lead) for n in (*inputs, node)]
                params = node.params if node.prim.lift is None else node.prim.lift(node.params, lead)
            g = fit(apply_rule(node, rule, i, ct, values, avals, params), avals[i], 1)
        else:
            g = mapped("jacobian", _rule_of(node, rule, i, values, plain, target.aval), ct)
        accumulate(cts, target.index, g)


def _pull_window(record: Applied, ct: Tensor, cts: Cotangents, path: set[int] | None, lead: int | None) -> None:
    """The same of a slice: its operand's cotangent is zeros but for a window."""
    (source,), params = record.inputs, record.node.params
    if path is not None and source.index not in path:
        return
    aval = source.aval
    if lead is not None:
        assert slice_p.lift is not None
        aval, params = lifted(aval, lead), slice_p.lift(params, lead)
    windows = cts.get(source.index)
    if type(windows) is not Windows:
        windows = cts[source.index] = Windows(aval, None if windows is None else tensor_of(windows, aval))
    windows.add(ct, params["index"])


def _pull_jointly(
    record: Applied,
    ct: Tensor,
    values: dict[int, Tensor],
    avals: list[ShapedArray],
    cts: Cotangents,
    path: set[int] | None,
    lead: int | None,
) -> None:
    """The same by one rule for all operands (None: none); rows of a Jacobian by a batch of calls."""
    node, inputs = record.node, record.inputs
    rule = record.plan.pulls[0][1]
    wanted = tuple([i for i in record.plan.positions if path is None or inputs[i].index in path])

    def pull(ct: Tensor, wanted: tuple[int, ...]) -> list[Tensor | None]:
        if node.aval.dtype.kind != "c" or not node.prim.holomorphic:
            found: list[Tensor | None] = rule(ct, values, avals, node.params, wanted)
            return found
        back = rule(conj(ct), values, avals, node.params, wanted)  # as in apply_rule
        return [None if g is None else conj(g) for g in back]

    def one(i: int, ct: Tensor) -> Tensor:
        (g,) = pull(ct, (i,))
        return zeros_of(avals[i]) if g is None else fit(g, avals[i])

    gs: list[Tensor | None]
    if lead is None:
        gs = pull(ct, wanted) if wanted else []
    else:
        gs = [mapped("jacobian", partial(one, i), ct) for i in wanted]
    for i, g in zip(wanted, gs, strict=True):
        if g is not None:
            accumulate(cts, inputs[i].index, fit(g, avals[i]) if lead is None else g)


def apply_rule(
    node: Node,
    rule: Rule,
    i: int,
    ct: Tensor,
    values: dict[int, Tensor],
    avals: list[ShapedArray],
    params: Params,
) -> Tensor:
    """What one rule yields: a partial derivative times ``ct``, or the cotangent itself."""
    if rule.constant is not None:
        if rule.constant == 1:
            return ct
        if rule.constant == -1:
            return -ct
        return zeros_of(ct._buffer.node.aval)
    prim = node.prim
    if node.aval.dtype.kind != "c" or not prim.holomorphic or prim.is_linear:
        if not isinstance(prim, Elementwise):
            found: Tensor = rule(ct, values, avals, params, i)
            return found
        return derivative.apply(prim, rule, i, ct, values, avals, params)
    if isinstance(prim, Elementwise) and not rule.seeded:
        return ct * conj(rule(ct, values, avals, params, i))
    # rules are written for the plain transpose; the cotangent of a real loss wants its conjugate
    return conj(rule(conj(ct), values, avals, params, i))


def _rule_of(
    node: Node, rule: Rule, i: int, values: dict[int, Tensor], avals: list[ShapedArray], aval: ShapedArray
) -> Callable[[Tensor], Tensor]:
    return lambda ct: fit(apply_rule(node, rule, i, ct, values, avals, node.params), aval)


def fit(g: Tensor, aval: ShapedArray, lead: int = 0) -> Tensor:
    """``g`` summed over what was broadcast, in the dtype of ``aval``."""
    have = g._buffer.node.aval
    if have.shape != aval.shape:
        g = sum_to(g, aval.shape, lead)
    if have.dtype != aval.dtype:
        if have.dtype.kind == "c" and aval.dtype.kind != "c":
            g = real(g)
        g = cast(g, aval.dtype)
    return g


def lifted(aval: ShapedArray, lead: int) -> ShapedArray:
    """``aval`` with one more leading axis."""
    return shaped((lead, *aval.shape), aval.dtype, aval.device)


def accumulate(cts: Cotangents, index: int, g: Tensor | IndexedSlices) -> None:
    """Add to the cotangent of a value."""
    have = cts.get(index)
    if have is None:
        cts[index] = g
    elif isinstance(g, IndexedSlices):
        cts[index] = have + g if type(have) is IndexedSlices else tensor_of(have, None) + g.to_dense()
    else:
        cts[index] = add(tensor_of(have, g._buffer.node.aval), g)


def _pull_call(
    record: Called,
    cts: Cotangents,
    keep: set[int],
    path: set[int] | None,
    lead: int | None,
    forced: AbstractSet[int],
) -> None:
    """One call: its own rule, asked only for the inputs on the path, and only if a cotangent has come."""
    call, inputs, outputs = record.call, record.inputs, record.results
    upstream = [cts.get(n.index) if n.index in keep else cts.pop(n.index, None) for n in outputs]
    upstream = [ct if ct is None else tensor_of(ct, n.aval) for ct, n in zip(upstream, outputs, strict=True)]
    needed = frozenset(i for i, n in enumerate(inputs) if n is not None and (path is None or n.index in path))
    if not needed or all(ct is None for ct in upstream):
        if not outputs or outputs[0].index not in forced:
            return
    realize([ct._buffer for ct in upstream if ct is not None])  # pending values, too, before the call takes memory
    found = during(call.pullback, upstream, needed, lead, cts, deferring=None)
    for i, (source, g) in enumerate(zip(inputs, found)):
        if source is None or g is None or i not in needed:
            continue
        aval = source.aval if lead is None else lifted(source.aval, lead)
        if g.shape != aval.shape:
            raise GradientError(
                f"{call.name}: the gradient of input {i} has shape {g.shape}, the input {aval.shape}; "
                "sum or reshape it in the gradient function"
            )
        accumulate(cts, source.index, g if g.dtype == aval.dtype else g.astype(aval.dtype))
