"""Ordinary differential equations and integrals of samples under scipy.integrate's names."""

from __future__ import annotations

from tapegrad.integrate.odes import OdeResult, odeint, solve_ivp
from tapegrad.integrate.samples import simpson
from tapegrad.ops.reduce.differences import cumulative_trapezoid, trapezoid
from tapegrad.spellings import explain

__all__ = ["OdeResult", "cumulative_trapezoid", "odeint", "simpson", "solve_ivp", "trapezoid"]
explain(globals(), __name__)
