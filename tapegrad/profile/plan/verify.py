"""What a plan has predicted, beside what a run with it has measured."""

from __future__ import annotations

from statistics import median

from tapegrad.profile.compare import steady_steps
from tapegrad.profile.plan.file import Plan
from tapegrad.profile.plan.problem import is_complete
from tapegrad.profile.report.units import iec, ms
from tapegrad.profile.runs.model import Run


def verified(run: Run, plan: Plan) -> list[str]:
    """Lines that compare peak, and step time where it was predicted; both of steps but the first.

    None for a run that has not come to its end, of which the plan says nothing.
    """
    if not is_complete(run):
        return []
    predicted = plan.predicted
    lines = [
        f"plan: peak predicted {iec(predicted.peak_bytes)}, measured {iec(run.peak['bytes'])}"
        f" ({_change(run.peak['bytes'], predicted.peak_bytes)})"
    ]
    steps = steady_steps(run)
    if predicted.step_ns and steps:
        took = int(median(max(0, run.steps["end_ns"][i] - run.steps["begin_ns"][i]) for i in steps))
        lines.append(
            f"plan: step predicted {ms(predicted.step_ns)}, measured {ms(took)} ({_change(took, predicted.step_ns)}); "
            f"without it {ms(plan.measured_ns)} when it was made"
        )
    return lines


def _change(measured: int, predicted: int) -> str:
    if measured == predicted:
        return "equal"
    return f"{(measured - predicted) / max(1, predicted):+.1%}"
