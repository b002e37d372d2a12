"""Policies: which values are saved, recomputed, or moved to another memory.

A policy is asked about one value at a time, and answers SAVE, RECOMPUTE or OFFLOAD.  Use it with
``recompute_grad(f, policy=...)``, ``memory_budget(limit, policy=...)`` or ``tg.memory.policy(...)``::

    tg.recompute_grad(block, policy=policies.save_matmuls)
    tg.memory_budget("2GiB", policy=policies.any_of(policies.save_names("h"), policies.offload_names("z")))
    tg.recompute_grad(block, policy=lambda v: policies.SAVE if v.nbytes < 4096 else policies.RECOMPUTE)

The answer may depend on what :class:`Value` tells, and on nothing else.  A policy is asked about values that have
bytes of their own: a view is the value that it looks at, and an elementwise value that is never stored (the interior of
a fused region) is computed by the kernels that read it, unless it has a name: a named value that a policy saves or
offloads is stored.

The ready-made ones are those of ``jax.checkpoint_policies`` (``everything_saveable``, ``dots_saveable``,
``save_only_these_names``, ``save_and_offload_only_these_names``), for eager code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.node import LEAF, Node
from tapegrad.core.primitive import Barrier
from tapegrad.errors import PolicyError
from tapegrad.remat.offload.tiers import Tier
from tapegrad.spellings import open_to_users

if TYPE_CHECKING:
    from tapegrad.device.types import Params


__all__ = [
    "OFFLOAD", "RECOMPUTE", "SAVE", "Answer", "Decision", "Offload", "Policy", "Value", "any_of", "offload_names",
    "save_collectives", "save_everything", "save_matmuls", "save_names", "save_nothing",
]  # fmt: skip


class Decision(Enum):
    """What becomes of a value between its making and the backward walk."""

    SAVE = "save"
    """Its bytes stay where they are; no budget drops them."""
    RECOMPUTE = "recompute"
    """It may be evicted, and is then recomputed."""
    OFFLOAD = "offload"
    """Its bytes move to the default tier of its device (:func:`tapegrad.remat.offload.tiers.default`), and come back.

    Of an array that is not contiguous they stay: it would come back in another layout, and what reads it might round
    otherwise.  ``recompute_grad`` saves it then, a budget may drop it.
    """


SAVE, RECOMPUTE, OFFLOAD = Decision


@dataclass(frozen=True)
class Offload:
    """OFFLOAD, to a tier of one's own."""

    tier: Tier


@dataclass(frozen=True)
class Value:
    """What a policy may know of a value."""

    primitive: str
    """The name of the primitive that made it."""
    params: Params
    """The primitive's parameters; not to be changed."""
    aval: ShapedArray
    """Shape, dtype and device."""
    names: tuple[str, ...] = ()
    """The names that ``tg.name`` has given it so far."""
    product: bool = False
    """Whether arithmetic outweighs the bytes moved: of products and convolutions (the primitive declares ``flops``)."""
    collective: bool = False
    """Whether other ranks took part (``tg.distributed``): to recompute it, all of them communicate again."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.aval.nbytes


Answer = Decision | Offload
Policy = Callable[[Value], Answer]


def save_nothing(value: Value) -> Answer:
    """RECOMPUTE: what no policy at all means."""
    return RECOMPUTE


def save_everything(value: Value) -> Answer:
    """SAVE."""
    return SAVE


def save_matmuls(value: Value) -> Answer:
    """SAVE the results of products and convolutions (what declares ``flops``), RECOMPUTE the rest."""
    return SAVE if value.product else RECOMPUTE


def save_collectives(value: Value) -> Answer:
    """SAVE what collectives of ``tg.distributed`` yield (halos, dot products): a rerun then needs no network.

    RECOMPUTE the rest.  Without a policy, reruns communicate again, on all ranks.
    """
    return SAVE if value.collective else RECOMPUTE


def save_names(*names: str) -> Policy:
    """A policy: SAVE what ``tg.name`` has given one of ``names``, RECOMPUTE the rest.  Raises PolicyError."""
    return _Named("save_names", names, SAVE)


def offload_names(*names: str, tier: Tier | None = None) -> Policy:
    """A policy: OFFLOAD what ``tg.name`` has given one of ``names`` (to ``tier``), RECOMPUTE the rest.

    Raises PolicyError.
    """
    return _Named("offload_names", names, OFFLOAD if tier is None else Offload(tier))


def any_of(*policies: Policy) -> Policy:
    """A policy: the first answer of ``policies`` that is not RECOMPUTE.  Raises PolicyError."""
    return _AnyOf(tuple(checked("any_of", p) for p in policies))


@dataclass(frozen=True)
class _Named:
    what: str
    names: tuple[str, ...]
    answer: Answer

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(n, str) for n in self.names):
            raise PolicyError(f'{self.what}: names are needed, each a string, such as {self.what}("h")')

    def __call__(self, value: Value) -> Answer:
        return RECOMPUTE if set(self.names).isdisjoint(value.names) else self.answer


@dataclass(frozen=True)
class _AnyOf:
    policies: tuple[Policy, ...]

    def __call__(self, value: Value) -> Answer:
        answers = (decide(p, value) for p in self.policies)
        return next((a for a in answers if a is not RECOMPUTE), RECOMPUTE)


def checked(what: str, policy: Any) -> Policy:
    """``policy``, if it can be one.  Raises PolicyError naming ``what``."""
    if not callable(policy):
        raise PolicyError(f"{what}: a policy is a function of a value, such as policies.save_matmuls, not {policy!r}")
    if policy in (save_names, offload_names, any_of):
        raise PolicyError(f"{what}: policies.{policy.__name__} makes a policy: call it, {policy.__name__}(...)")
    return policy


def decide(policy: Policy, value: Value) -> Answer:
    """The policy's answer.  Raises PolicyError if it is none."""
    answer = policy(value)
    if not isinstance(answer, (Decision, Offload)):
        raise PolicyError(
            f"policy {policy!r} answered {answer!r} about {value.primitive} {value.aval!r}; "
            "an answer is SAVE, RECOMPUTE, OFFLOAD or Offload(tier), of tapegrad.memory.policies"
        )
    return answer


def asked(policy: Policy | None, node: Node, names: tuple[str, ...]) -> Answer:
    """What ``policy`` says of the value of ``node``; RECOMPUTE of what no primitive has made."""
    prim = node.prim
    if policy is None or prim is LEAF:
        return RECOMPUTE
    product = isinstance(prim, Barrier) and prim.flops is not None
    return decide(policy, Value(prim.name, node.params, node.aval, names, product, prim.effect is not None))


open_to_users(globals(), __name__)
