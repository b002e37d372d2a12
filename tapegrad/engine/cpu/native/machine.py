"""Machine code made by LLVM, through llvmlite (the extra ``native``).

``TAPEGRAD_NATIVE=0`` keeps everything interpreted.  :func:`why_not` names the reason where there is no machine code.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tapegrad.device.float_errors import reported
from tapegrad.engine.cpu.native import objects
from tapegrad.engine.cpu.native.emit import STRIDED, Structure, function
from tapegrad.engine.cpu.native.ops import CASTS

HOW = "pip install 'tapegrad[native]'"
"""How to get the optional package."""
_LEAST_LLVM = (20, 0, 0)
"""The oldest LLVM that the tests have run with (llvmlite 0.45)."""
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")


@cache
def _opened() -> tuple[Any, str]:
    """The module llvmlite.binding with the native target, and why there is none."""
    if platform.machine().lower() not in (*_X86, *_ARM):
        return None, f"no machine code for {platform.machine()}"
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped]

        if llvm.llvm_version_info < _LEAST_LLVM:
            return None, f"llvmlite has LLVM {llvm.llvm_version_info[0]}, which is too old: {HOW} --upgrade"
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        return llvm, ""
    except ImportError:
        return None, f"llvmlite is not installed: {HOW}"
    except Exception as e:  # a library that cannot be loaded, a target that is not there
        return None, f"{type(e).__name__}: {e}"


@cache
def _ready() -> tuple[Any, dict[str, int], str]:
    """The runner as a function of C, addresses of loops by name, and why there are none."""
    llvm, reason = _opened()
    if llvm is None:
        return None, {}, reason
    try:
        flags = _X86_FLAGS if is_x86() else _ARM_FLAGS
        moves = "".join((_COPY + _SELECT).replace("SIZE", str(n)).replace("BITS", str(8 * n)) for n in _MOVED)
        casts = {_name_of_cast(*pair): _structure_of_cast(*pair) for pair in CASTS}
        names = ["run", "nest", "reduction", "sequence", *casts]
        names += [f"{move}{n}" for n in _MOVED for move in _MOVES]
        text = [_RUNNER, _NEST, _REDUCTION, _SEQUENCE, moves, flags]
        text += [function(name, structure) for name, structure in casts.items()]
        made = compiled("\n".join(text), names, 2)
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        return kind(made["run"]), made, ""
    except Exception as e:  # memory that may be written and executed is forbidden in some processes
        return None, {}, f"{type(e).__name__}: {e}"


def copy(itemsize: int) -> int:
    """Return the address of a loop that copies elements of ``itemsize`` bytes; 0: there is none."""
    return _ready()[1].get(f"copy{itemsize}", 0)


def select(itemsize: int) -> int:
    """Return the address of a loop that selects elements of ``itemsize`` bytes by a bool; 0: there is none."""
    return _ready()[1].get(f"select{itemsize}", 0)


def _structure_of_cast(source: str, target: str) -> Structure:
    return Structure(((source, STRIDED),), (("cast", source, (0,), target),), ((1, STRIDED),))


def cast(source: str, target: str) -> int:
    """Return the address of a loop that converts elements between dtypes by their characters; 0: there is none."""
    return _ready()[1].get(_name_of_cast(source, target), 0)


def _name_of_cast(source: str, target: str) -> str:
    return f"cast.{source}{target}".replace("?", "b")


def reduction() -> int:
    """Return the address of a loop that reduces its first operand to its second, zero bytes at first.

    Its context is a record of four words: function, context and auxiliary data of a ufunc's loop, and the itemsize.  A
    result without a stride is one element; else, behind its own size and strides, the loop reads how many rows the
    first operand has, and the bytes from one to the next, and reduces these.
    """
    return _ready()[1]["reduction"]


def sequence() -> int:
    """Return the address of a loop that calls others one after the other, on a few elements at a time.

    Its context is a record: how many rows, elements at a time, and operands; for each operand the bytes from one
    element to the next (0: it has one, or is scratch); then the rows: function, context and auxiliary data of a loop,
    the flags that count, the number of its operands, which of the operands these are, and their strides.  The loop
    returns the flags.
    """
    return _ready()[1]["sequence"]


def nest() -> int:
    """Return the address of a loop that calls another one, row by row.

    Its context is a record of five words: function, context and auxiliary data of the other loop, how many operands
    there are, and how many nested loops.  Sizes are those of the innermost loop, then of the others, outermost first;
    so are strides, for each loop one per operand.  It returns what the other loop has returned, joined by or.
    """
    return _ready()[1]["nest"]


def runner() -> Callable[[int, int, int, int], int] | None:
    """Return ``run(table, first, last, mask)``, which walks entries of a table; None where there is no machine code.

    It calls the entries from ``first`` up to ``last``, without the interpreter's lock, and returns 64 times the number
    of the first one after which flags of ``mask`` are up, plus these flags; or 64 times ``last``.
    """
    return None if is_off() else _ready()[0]


def why_not() -> str:
    """Return the reason why no machine code runs; empty if it does."""
    return "TAPEGRAD_NATIVE=0" if is_off() else _ready()[2]


def is_off() -> bool:
    """Whether the user wants no machine code."""
    return os.environ.get("TAPEGRAD_NATIVE") == "0"


def version() -> str:
    """Return the version of LLVM; empty where there is none."""
    llvm, _ = _opened()
    return "" if llvm is None else ".".join(map(str, llvm.llvm_version_info))


@cache
def is_x86() -> bool:
    """Whether this is an x86-64, whose error flags lie in MXCSR; else it is an AArch64 with FPSR."""
    return platform.machine().lower() in _X86


@cache
def flag_bits() -> Mapping[str, int]:
    """Return the bit of each of NumPy's floating-point errors in the register of flags."""
    return (
        {"invalid": 1, "divide": 4, "over": 8, "under": 16}
        if is_x86()
        else {"invalid": 1, "divide": 2, "over": 4, "under": 8}
    )


def reported_mask() -> int:
    """Return the bits of the errors that this thread does not ignore."""
    return _mask_of(tuple(reported()))


@cache
def _mask_of(kinds: tuple[str, ...]) -> int:
    return sum(flag_bits()[kind] for kind in kinds)


@cache
def _processor() -> tuple[str, str]:
    """The name and the features of this processor, in LLVM's words."""
    llvm, _ = _opened()
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


_engines: list[Any] = []
"""Own machine code."""


def compiled(text: str, names: list[str], level: int = 1) -> dict[str, int]:
    """Compile ``text`` (LLVM's IR) for this processor; return the addresses of the functions ``names``."""
    llvm, _ = _opened()
    module = llvm.parse_assembly(text)
    module.verify()
    cpu, features = _processor()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=level)
    engine = llvm.create_mcjit_compiler(module, machine)
    name = objects.key(text, version(), cpu, features, str(level))
    engine.set_object_cache(lambda _, data: objects.store(name, bytes(data)), lambda _: objects.load(name))
    engine.finalize_object()
    _engines.append(engine)
    return {name: engine.get_function_address(name) for name in names}


_RUNNER = """
%entry = type { ptr, ptr, ptr, ptr, ptr, ptr, i64, i64 }
define i64 @run(ptr %table, i64 %first, i64 %last, i64 %mask) {
start:
  call void @clear()
  %some = icmp slt i64 %first, %last
  br i1 %some, label %loop, label %done
loop:
  %i = phi i64 [ %first, %start ], [ %next, %quiet ]
  %function.p = getelementptr %entry, ptr %table, i64 %i, i32 0
  %context.p = getelementptr %entry, ptr %table, i64 %i, i32 1
  %auxdata.p = getelementptr %entry, ptr %table, i64 %i, i32 2
  %data.p = getelementptr %entry, ptr %table, i64 %i, i32 3
  %dims.p = getelementptr %entry, ptr %table, i64 %i, i32 4
  %strides.p = getelementptr %entry, ptr %table, i64 %i, i32 5
  %mask.p = getelementptr %entry, ptr %table, i64 %i, i32 6
  %function = load ptr, ptr %function.p
  %context = load ptr, ptr %context.p
  %auxdata = load ptr, ptr %auxdata.p
  %data = load ptr, ptr %data.p
  %dims = load ptr, ptr %dims.p
  %strides = load ptr, ptr %strides.p
  %own = load i64, ptr %mask.p
  call i32 %function(ptr %context, ptr %data, ptr %dims, ptr %strides, ptr %auxdata)
  %flags = call i64 @flags()
  %seen = and i64 %flags, %mask
  %any = icmp ne i64 %seen, 0
  br i1 %any, label %look, label %quiet
look:
  %stopping = and i64 %seen, %own
  %stop = icmp ne i64 %stopping, 0
  br i1 %stop, label %stopped, label %forget
stopped:
  %number = shl i64 %i, 6
  %answer = or i64 %number, %stopping
  ret i64 %answer
forget:
  call void @clear()
  br label %quiet
quiet:
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %last
  br i1 %more, label %loop, label %done
done:
  %end = shl i64 %last, 6
  ret i64 %end
}
"""
"""An entry: function, context, auxiliary data, pointers, sizes, strides, and which flags count after it."""

_NEST = """
define i32 @nest(ptr %record, ptr %data, ptr %dims, ptr %strides, ptr %ignored) {
start:
  %function = load ptr, ptr %record
  %context.p = getelementptr i64, ptr %record, i64 1
  %context = load ptr, ptr %context.p
  %auxdata.p = getelementptr i64, ptr %record, i64 2
  %auxdata = load ptr, ptr %auxdata.p
  %count.p = getelementptr i64, ptr %record, i64 3
  %count = load i64, ptr %count.p
  %loops.p = getelementptr i64, ptr %record, i64 4
  %loops = load i64, ptr %loops.p
  %pointers = alloca [64 x i64]
  %turns = alloca [8 x i64]
  br label %copy
copy:
  %k = phi i64 [ 0, %start ], [ %k.next, %copy ]
  %from = getelementptr i64, ptr %data, i64 %k
  %to = getelementptr i64, ptr %pointers, i64 %k
  %pointer = load i64, ptr %from
  store i64 %pointer, ptr %to
  %k.next = add i64 %k, 1
  %k.more = icmp slt i64 %k.next, %count
  br i1 %k.more, label %copy, label %zero
zero:
  %z = phi i64 [ 0, %copy ], [ %z.next, %zero ]
  %turn.z = getelementptr i64, ptr %turns, i64 %z
  store i64 0, ptr %turn.z
  %z.next = add i64 %z, 1
  %z.more = icmp slt i64 %z.next, 8
  br i1 %z.more, label %zero, label %call
call:
  %seen = phi i32 [ 0, %zero ], [ %seen.now, %moved ]
  %status = call i32 %function(ptr %context, ptr %pointers, ptr %dims, ptr %strides, ptr %auxdata)
  %seen.now = or i32 %seen, %status
  %outer = sub i64 %loops, 1
  br label %carry
carry:
  %loop = phi i64 [ %outer, %call ], [ %loop.next, %rewound ]
  %over = icmp eq i64 %loop, 0
  br i1 %over, label %done, label %turn
turn:
  %turn.p = getelementptr i64, ptr %turns, i64 %loop
  %turn.old = load i64, ptr %turn.p
  %turn.new = add i64 %turn.old, 1
  %size.p = getelementptr i64, ptr %dims, i64 %loop
  %size = load i64, ptr %size.p
  %goes.on = icmp slt i64 %turn.new, %size
  %back = sub i64 0, %turn.old
  %steps = select i1 %goes.on, i64 1, i64 %back
  %turn.now = select i1 %goes.on, i64 %turn.new, i64 0
  store i64 %turn.now, ptr %turn.p
  %row = mul i64 %loop, %count
  br label %move
move:
  %m = phi i64 [ 0, %turn ], [ %m.next, %move ]
  %at = add i64 %row, %m
  %stride.p = getelementptr i64, ptr %strides, i64 %at
  %stride = load i64, ptr %stride.p
  %way = mul i64 %stride, %steps
  %there = getelementptr i64, ptr %pointers, i64 %m
  %old = load i64, ptr %there
  %new = add i64 %old, %way
  store i64 %new, ptr %there
  %m.next = add i64 %m, 1
  %m.more = icmp slt i64 %m.next, %count
  br i1 %m.more, label %move, label %moved
moved:
  br i1 %goes.on, label %call, label %rewound
rewound:
  %loop.next = sub i64 %loop, 1
  br label %carry
done:
  ret i32 %seen.now
}
"""

_MOVED, _MOVES = (1, 2, 4, 8, 16), ("copy", "select")
_COPY = """
define i32 @copySIZE(ptr %context, ptr %data, ptr %dims, ptr %strides, ptr %auxdata) {
start:
  %n = load i64, ptr %dims
  %from = load ptr, ptr %data
  %to.p = getelementptr ptr, ptr %data, i64 1
  %to = load ptr, ptr %to.p
  %s = load i64, ptr %strides
  %t.p = getelementptr i64, ptr %strides, i64 1
  %t = load i64, ptr %t.p
  %dense.from = icmp eq i64 %s, SIZE
  %dense.to = icmp eq i64 %t, SIZE
  %dense = and i1 %dense.from, %dense.to
  br i1 %dense, label %whole, label %loop
whole:
  %bytes = mul i64 %n, SIZE
  call void @llvm.memmove.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  ret i32 0
loop:
  %i = phi i64 [ 0, %start ], [ %next, %loop ]
  %x.o = mul i64 %i, %s
  %x.p = getelementptr i8, ptr %from, i64 %x.o
  %y.o = mul i64 %i, %t
  %y.p = getelementptr i8, ptr %to, i64 %y.o
  %x = load iBITS, ptr %x.p, align 1
  store iBITS %x, ptr %y.p, align 1
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret i32 0
}
"""
_SELECT = """
define i32 @selectSIZE(ptr %context, ptr %data, ptr %dims, ptr %strides, ptr %auxdata) {
start:
  %n = load i64, ptr %dims
  %condition = load ptr, ptr %data
  %x.at = getelementptr ptr, ptr %data, i64 1
  %x = load ptr, ptr %x.at
  %y.at = getelementptr ptr, ptr %data, i64 2
  %y = load ptr, ptr %y.at
  %to.at = getelementptr ptr, ptr %data, i64 3
  %to = load ptr, ptr %to.at
  %c.s = load i64, ptr %strides
  %x.s.at = getelementptr i64, ptr %strides, i64 1
  %x.s = load i64, ptr %x.s.at
  %y.s.at = getelementptr i64, ptr %strides, i64 2
  %y.s = load i64, ptr %y.s.at
  %to.s.at = getelementptr i64, ptr %strides, i64 3
  %to.s = load i64, ptr %to.s.at
  br label %loop
loop:
  %i = phi i64 [ 0, %start ], [ %next, %loop ]
  %c.o = mul i64 %i, %c.s
  %c.p = getelementptr i8, ptr %condition, i64 %c.o
  %x.o = mul i64 %i, %x.s
  %x.p = getelementptr i8, ptr %x, i64 %x.o
  %y.o = mul i64 %i, %y.s
  %y.p = getelementptr i8, ptr %y, i64 %y.o
  %to.o = mul i64 %i, %to.s
  %to.p = getelementptr i8, ptr %to, i64 %to.o
  %c = load i8, ptr %c.p
  %holds = icmp ne i8 %c, 0
  %x.v = load iBITS, ptr %x.p, align 1
  %y.v = load iBITS, ptr %y.p, align 1
  %v = select i1 %holds, iBITS %x.v, iBITS %y.v
  store iBITS %v, ptr %to.p, align 1
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %done
done:
  ret i32 0
}
"""
_REDUCTION = """
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define i32 @reduction(ptr %record, ptr %data, ptr %dims, ptr %strides, ptr %ignored) {
start:
  %function = load ptr, ptr %record
  %context.p = getelementptr i64, ptr %record, i64 1
  %context = load ptr, ptr %context.p
  %auxdata.p = getelementptr i64, ptr %record, i64 2
  %auxdata = load ptr, ptr %auxdata.p
  %size.p = getelementptr i64, ptr %record, i64 3
  %size = load i64, ptr %size.p
  %from = load ptr, ptr %data
  %to.p = getelementptr ptr, ptr %data, i64 1
  %to = load ptr, ptr %to.p
  %step = load i64, ptr %strides
  %to.step.p = getelementptr i64, ptr %strides, i64 1
  %to.step = load i64, ptr %to.step.p
  %pointers = alloca [3 x ptr]
  store ptr %to, ptr %pointers
  %second = getelementptr ptr, ptr %pointers, i64 1
  %third = getelementptr ptr, ptr %pointers, i64 2
  store ptr %to, ptr %third
  %steps = alloca [3 x i64]
  store i64 %to.step, ptr %steps
  %step.p = getelementptr i64, ptr %steps, i64 1
  store i64 %step, ptr %step.p
  %last = getelementptr i64, ptr %steps, i64 2
  store i64 %to.step, ptr %last
  %one = icmp eq i64 %to.step, 0
  br i1 %one, label %begin, label %several
several:
  %n = load i64, ptr %dims
  %row.bytes = mul i64 %n, %size
  %rows.p = getelementptr i64, ptr %dims, i64 1
  %rows.given = load i64, ptr %rows.p
  %way.p = getelementptr i64, ptr %strides, i64 2
  %way.given = load i64, ptr %way.p
  br label %begin
begin:
  %bytes = phi i64 [ %size, %start ], [ %row.bytes, %several ]
  %rows = phi i64 [ 1, %start ], [ %rows.given, %several ]
  %way = phi i64 [ 0, %start ], [ %way.given, %several ]
  call void @llvm.memset.p0.i64(ptr %to, i8 0, i64 %bytes, i1 false)
  br label %row
row:
  %r = phi i64 [ 0, %begin ], [ %next, %row ]
  %offset = mul i64 %r, %way
  %x = getelementptr i8, ptr %from, i64 %offset
  store ptr %x, ptr %second
  %status = call i32 %function(ptr %context, ptr %pointers, ptr %dims, ptr %steps, ptr %auxdata)
  %next = add i64 %r, 1
  %more = icmp slt i64 %next, %rows
  br i1 %more, label %row, label %done
done:
  ret i32 0
}
"""

_SEQUENCE = """
define i32 @sequence(ptr %record, ptr %data, ptr %dims, ptr %strides, ptr %ignored) {
start:
  %n = load i64, ptr %dims
  %rows = load i64, ptr %record
  %chunk.p = getelementptr i64, ptr %record, i64 1
  %chunk = load i64, ptr %chunk.p
  %count.p = getelementptr i64, ptr %record, i64 2
  %count = load i64, ptr %count.p
  %ways = getelementptr i64, ptr %record, i64 3
  %table = getelementptr i64, ptr %ways, i64 %count
  %pointers = alloca [64 x i64]
  %size = alloca i64
  br label %tile
tile:
  %i = phi i64 [ 0, %start ], [ %i.next, %tiled ]
  %seen = phi i64 [ 0, %start ], [ %seen.now, %tiled ]
  %left = sub i64 %n, %i
  %short = icmp slt i64 %left, %chunk
  %here = select i1 %short, i64 %left, i64 %chunk
  store i64 %here, ptr %size
  br label %row
row:
  %r = phi i64 [ 0, %tile ], [ %r.next, %called ]
  %words = phi ptr [ %table, %tile ], [ %words.next, %called ]
  %seen.row = phi i64 [ %seen, %tile ], [ %seen.now, %called ]
  %function = load ptr, ptr %words
  %context.p = getelementptr i64, ptr %words, i64 1
  %context = load ptr, ptr %context.p
  %auxdata.p = getelementptr i64, ptr %words, i64 2
  %auxdata = load ptr, ptr %auxdata.p
  %counted.p = getelementptr i64, ptr %words, i64 3
  %counted = load i64, ptr %counted.p
  %k.p = getelementptr i64, ptr %words, i64 4
  %k = load i64, ptr %k.p
  %which = getelementptr i64, ptr %words, i64 5
  %steps = getelementptr i64, ptr %which, i64 %k
  %words.next = getelementptr i64, ptr %steps, i64 %k
  br label %operand
operand:
  %j = phi i64 [ 0, %row ], [ %j.next, %operand ]
  %number.p = getelementptr i64, ptr %which, i64 %j
  %number = load i64, ptr %number.p
  %base.p = getelementptr i64, ptr %data, i64 %number
  %base = load i64, ptr %base.p
  %way.p = getelementptr i64, ptr %ways, i64 %number
  %way = load i64, ptr %way.p
  %offset = mul i64 %way, %i
  %address = add i64 %base, %offset
  %to = getelementptr i64, ptr %pointers, i64 %j
  store i64 %address, ptr %to
  %j.next = add i64 %j, 1
  %j.more = icmp slt i64 %j.next, %k
  br i1 %j.more, label %operand, label %call
call:
  call void @clear()
  %status = call i32 %function(ptr %context, ptr %pointers, ptr %size, ptr %steps, ptr %auxdata)
  %flags = call i64 @flags()
  %counts = and i64 %flags, %counted
  %seen.now = or i64 %seen.row, %counts
  br label %called
called:
  %r.next = add i64 %r, 1
  %r.more = icmp slt i64 %r.next, %rows
  br i1 %r.more, label %row, label %tiled
tiled:
  %i.next = add i64 %i, %chunk
  %i.more = icmp slt i64 %i.next, %n
  br i1 %i.more, label %tile, label %done
done:
  call void @clear()
  %answer = trunc i64 %seen.now to i32
  ret i32 %answer
}
"""

_X86_FLAGS = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define internal i64 @flags() {
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %word = load i32, ptr %p
  %old = call i16 asm sideeffect "fnstsw $0", "={ax}"()
  %wide = zext i16 %old to i32
  %both = or i32 %word, %wide
  %flags32 = and i32 %both, 63
  %flags = zext i32 %flags32 to i64
  ret i64 %flags
}
define internal void @clear() {
  call void asm sideeffect "fnclex", ""()
  %p = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %p)
  %word = load i32, ptr %p
  %quiet = and i32 %word, -64
  store i32 %quiet, ptr %p
  call void @llvm.x86.sse.ldmxcsr(ptr %p)
  ret void
}
"""
"""The C library raises some errors in the flags of the x87, which NumPy reads, too."""
_ARM_FLAGS = """
declare i64 @llvm.aarch64.get.fpsr()
declare void @llvm.aarch64.set.fpsr(i64)
define internal i64 @flags() {
  %flags = call i64 @llvm.aarch64.get.fpsr()
  ret i64 %flags
}
define internal void @clear() {
  %word = call i64 @llvm.aarch64.get.fpsr()
  %quiet = and i64 %word, -32
  call void @llvm.aarch64.set.fpsr(i64 %quiet)
  ret void
}
"""
