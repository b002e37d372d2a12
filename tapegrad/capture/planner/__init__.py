"""The planner of captured steps: which values are computed again, so that a step keeps its budget."""
