"""Collectives: operations on the values of several ranks, differentiable to any order in both directions.

Each is a linear map from the values of all ranks to the results of all ranks, and its transpose is a collective, too.
What is differentiated is the **sum over ranks of the targets**; a target that every rank has the same way is counted
once (``walks.py``).

Every rank of the group calls the same collectives in the same order.  They are done when they are called, whether or
not somebody asks for their results, and no budget makes a result again on one rank alone.
"""
