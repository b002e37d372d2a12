"""Machine code on CPUs with NumPy's bits: NumPy's own inner loops by pointer, and kernels fused of exact ufuncs.

``loops`` finds NumPy's loops, ``ops`` and ``emit`` write kernels as LLVM's IR, ``machine`` and ``kernels`` compile
them, ``group`` says which calls a kernel can stand for, ``table`` runs calls without Python between them.
"""
