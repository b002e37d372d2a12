"""Random programs: drawn from a seed, printed as Python, run in many ways, compared with a reference, made small.

``ops`` says what a program may do, ``program`` what it is, ``draw`` makes one from a seed, ``reference`` is a small
automatic differentiation in NumPy that shares no code with tapegrad, ``variants`` runs a program and says what is
wrong, ``shrink`` makes a failing program small, ``search`` runs many, ``stress`` runs them in threads with interrupts
and forks.
"""
