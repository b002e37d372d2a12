"""Checkpoints: a tree of variables, layers, optimizers and numbers in one folder, written and read by all ranks.

``tree`` names what is saved, ``shards`` holds the bytes, ``index`` says where each value lies, ``folder`` makes the
folder appear at once or not at all, ``together`` makes an error of one rank an error of all.
"""

from tapegrad.distributed.saving.checkpoint import load, require_writable, save
from tapegrad.distributed.saving.tree import Sharded

__all__ = ["Sharded", "load", "require_writable", "save"]
