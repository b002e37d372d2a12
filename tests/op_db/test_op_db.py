"""PyTorch's sample inputs (``op_db``): values, both gradients and forward mode agree, or differ as is meant.

Slow, and needs PyTorch: ``pip install torch==2.13.0 expecttest``, then ``pytest -m slow tests/op_db``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from op_db.conventions import CONVENTIONS, Convention

pytestmark = pytest.mark.slow

SHARDS = 8


@pytest.fixture(scope="module")
def op_db() -> Iterator[list[Any]]:
    """PyTorch's entries for which tapegrad has a function."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("expecttest")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from op_db.compare import function_of
        from torch.testing._internal.common_methods_invocations import op_db as entries

        yield [op for op in entries if function_of(op.name) is not None]
    torch.set_num_threads(before)


def name_of(op: Any) -> str:
    return f"{op.name}/{op.variant_test_name}" if op.variant_test_name else op.name


def differences(op: Any) -> list[tuple[str, str]]:
    """Return (kind, what differs) of the samples of an entry; warnings of arithmetic are not compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(_differences(op))


def _differences(op: Any) -> Iterator[tuple[str, str]]:
    import torch
    from op_db.calls import RANDOM
    from op_db.compare import Difference, NotComparable, compare, function_of

    for dtype in (torch.float64, torch.complex128):
        for sample in op.sample_inputs("cpu", dtype, requires_grad=False) if dtype in op.dtypes else ():
            try:
                compare(op.name, function_of(op.name), op, sample)
            except NotComparable:
                continue
            except Difference as difference:
                kind, says = difference.args
                if op.name not in RANDOM or "error" in kind:
                    yield kind, says


def is_meant(convention: Convention, name: str, kind: str, says: str) -> bool:
    return bool(
        re.fullmatch(convention.op, name) and re.fullmatch(convention.kind, kind) and re.search(convention.says, says)
    )


@pytest.mark.parametrize("shard", range(SHARDS))
def test_differences_are_named_conventions(op_db: list[Any], shard: int) -> None:
    assert len(op_db) > 500
    unknown = [
        f"{name_of(op)}: {kind}: {says}"
        for op in op_db[shard::SHARDS]
        for kind, says in differences(op)
        if not any(is_meant(convention, name_of(op), kind, says) for convention in CONVENTIONS)
    ]
    assert unknown == []


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.op)
def test_each_convention_has_a_sample(op_db: list[Any], convention: Convention) -> None:
    entries = (op for op in op_db if re.fullmatch(convention.op, name_of(op)))
    assert any(is_meant(convention, name_of(op), *difference) for op in entries for difference in differences(op))
