"""Regions of lazy elementwise nodes: which nodes share a kernel (region), its program (emit), running it (launch)."""
