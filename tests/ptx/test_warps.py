"""What threads do together, and what they must not do: each fault is named with its line and its thread."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import run as machine
from .machine import computed, run
from .parse import PTXError

pytestmark = pytest.mark.slow

LANES = np.arange(64, dtype="u4")


def _lanes(source):
    """For each of 64 threads another lane of its warp."""
    return np.array([thread // 32 * 32 + source(thread % 32) for thread in range(64)])


@pytest.mark.parametrize(
    ("form", "b", "c", "source"),
    [
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("idx", 9, 31, lambda i: 9),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("down", 3, 31, lambda i: i + 3 if i + 3 < 32 else i),
        ("bfly", 8, 0x1807, lambda i: i ^ 8 if i & 8 else i),  # segments of 8 lanes: earlier ones may be read
        ("idx", 2, 0x1807, lambda i: i // 8 * 8 + 2),
        ("down", 1, 0x1807, lambda i: i + 1 if i % 8 < 7 else i),
        ("up", 1, 0x1800, lambda i: i - 1 if i % 8 else i),
    ],
)
def test_shuffles(form, b, c, source):
    x = LANES * 3 + 1
    got = computed(f"shfl.sync.{form}.b32 %y|%p1, %x0, {b}, {c}, -1;", x, to="u4")
    np.testing.assert_array_equal(got, x[_lanes(source)])


def test_votes():
    x = (LANES % 5 == 2).astype("u4")
    ballot = computed("setp.ne.u32 %p1, %x0, 0;  vote.sync.ballot.b32 %y, %p1, -1;", x, to="u4")
    wanted = [int("".join(str(n) for n in x[s : s + 32][::-1]), 2) for s in (0, 32)]
    assert ballot.tolist() == np.repeat(wanted, 32).tolist()
    for form, wants in (("any", 1), ("all", 0)):
        code = f"setp.ne.u32 %p1, %x0, 0;  vote.sync.{form}.pred %p2, %p1, -1;  selp.b32 %y, 1, 0, %p2;"
        assert computed(code, x, to="u4").tolist() == [wants] * 64
    assert computed("redux.sync.add.s32 %y, %x0, -1;", LANES, to="u4").tolist() == [496] * 32 + [1520] * 32
    match = computed("match.any.sync.b32 %y, %x0, -1;", LANES % 3, to="u4")
    assert match.tolist() == [sum(1 << j for j in range(32) if (s * 32 + j) % 3 == (s * 32 + i) % 3)
                              for s in (0, 1) for i in range(32)]  # fmt: skip


STAGE = """
    mad.lo.u32 %r1, %tid, 16, memory;  mul.wide.u32 %d5, %tid, 16;
    add.s64 %d6, %d0, %d5;  ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d6];  st.shared.v4.u32 [%r1], {%r2, %r3, %r4, %r5};
    @%p3 add.s64 %d6, %d1, %d5;
    @%p3 ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d6];
    @%p3 st.shared.v4.u32 [%r1+512], {%r2, %r3, %r4, %r5};
    bar.sync 0;
"""
STORE = """
    shr.u32 %r31, %tid, 2;  and.b32 %r32, %tid, 3;  mul.lo.u32 %r31, %r31, 32;  mad.lo.u32 %r31, %r32, 8, %r31;
    cvt.u64.u32 %d8, %r31;  add.s64 %d8, %d8, %out;
    st.global.v2.b32 [%d8], {%r20, %r21};  st.global.v2.b32 [%d8+256], {%r22, %r23};
"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_of_matrices_of_half_floats(kind):
    """Fragments as ldmatrix gives them, A of rows and B of rows turned, as every matrix kernel does it."""
    dtype = np.dtype(np.float16 if kind == "f16" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)).astype(dtype), rng.integers(-8, 9, (16, 8)).astype(dtype)
    body = f"""
        setp.lt.u32 %p3, %tid, 16;{STAGE}
        and.b32 %r6, %tid, 15;  shr.u32 %r7, %tid, 4;
        mad.lo.u32 %r8, %r6, 32, memory;  mad.lo.u32 %r8, %r7, 16, %r8;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8];
        mad.lo.u32 %r9, %r6, 16, memory;
        ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{%r14, %r15}}, [%r9+512];
        mov.b32 %r20, 0f3F800000;  mov.b32 %r21, %r20;  mov.b32 %r22, %r20;  mov.b32 %r23, %r20;
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};{STORE}"""
    got = run(body, 32, a.view("u2"), b.view("u2"), out=np.zeros((16, 8), np.float32))
    np.testing.assert_array_equal(got, a.astype(float) @ b.astype(float) + 1)


def test_products_of_matrices_of_tf32():
    """Each lane loads its elements by the ISA's table: A row lane / 4, column lane % 4, and 8 and 4 further on."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 8)).astype(np.float32), rng.integers(-8, 9, (8, 8)).astype(np.float32)
    body = f"""
        shr.u32 %r1, %tid, 2;  and.b32 %r2, %tid, 3;
        mad.lo.u32 %r3, %r1, 8, %r2;  mul.wide.u32 %d5, %r3, 4;  add.s64 %d5, %d5, %d0;
        ld.global.b32 %r10, [%d5];  ld.global.b32 %r11, [%d5+256];
        ld.global.b32 %r12, [%d5+16];  ld.global.b32 %r13, [%d5+272];
        mad.lo.u32 %r3, %r2, 8, %r1;  mul.wide.u32 %d6, %r3, 4;  add.s64 %d6, %d6, %d1;
        ld.global.b32 %r14, [%d6];  ld.global.b32 %r15, [%d6+128];
        mov.b32 %r20, 0;  mov.b32 %r21, 0;  mov.b32 %r22, 0;  mov.b32 %r23, 0;
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%r20, %r21, %r22, %r23}},
            {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};{STORE}"""
    np.testing.assert_array_equal(run(body, 32, a, b, out=np.zeros((16, 8), np.float32)), a @ b)


def test_barriers_let_blocks_through_one_by_one():
    """All read what one thread wrote; each block has memory of its own; nobody waits for a thread that has ended."""
    body = """
        setp.gt.u32 %p1, %tid, 90;
        @%p1 ret;
        mov.u32 %r1, %ctaid.x;  add.u32 %r2, %r1, 5;
        @%p0 st.shared.u32 [memory], %r2;
        bar.sync 0;
        ld.shared.u32 %r3, [memory];
        mad.lo.u32 %r4, %r1, 96, %tid;  mul.wide.u32 %d5, %r4, 4;  add.s64 %d5, %d5, %out;
        st.global.u32 [%d5], %r3;"""
    out = run(body, 96, out=np.zeros((70, 96), "u4"), blocks=70)
    assert (out[:, :91] == np.arange(5, 75)[:, None]).all() and (out[:, 91:] == 0).all()


ADDRESS = "mul.wide.u32 %d5, %tid, 4;  add.s64 %d5, %d5, %out;"
OWN = "mad.lo.u32 %r1, %tid, 4, memory;  st.shared.u32 [%r1], %tid;"
NEXT = "xor.b32 %r2, %tid, 1;  mad.lo.u32 %r2, %r2, 4, memory;"
FAULTS = {
    "past the end": (f"{ADDRESS} st.global.u32 [%d5+8], %tid;", "4 bytes outside of all arrays .*thread .62, 0, 0"),
    "no array": ("ld.global.u32 %r1, [%out+-64];", "4 bytes outside of all arrays"),
    "not aligned": (f"{ADDRESS} ld.global.v2.u32 {{%r1, %r2}}, [%d5];", "8 bytes of global memory are not aligned"),
    "past shared memory": ("mad.lo.u32 %r1, %tid, 4, memory; st.shared.u32 [%r1+4000], %tid;", "outside of the 4096"),
    "shared rubbish": ("ld.shared.u32 %r1, [memory+4];", "that nobody has written"),
    "no barrier after a write": (f"{OWN} {NEXT} ld.shared.u32 %r3, [%r2];", "without a barrier after its write"),
    "no barrier after a read": (f"{OWN} bar.sync 0; {NEXT} ld.shared.u32 %r3, [%r2]; st.shared.u32 [%r1], 7;",
                                "without a barrier after it was read"),
    "two at once": ("st.shared.u32 [memory], %tid;", "by two threads at once"),
    "a barrier that some pass by": ("setp.lt.u32 %p1, %tid, 5; @%p1 bra OVER; bar.sync 0; OVER: bar.sync 0;",
                                    "wait for others that never come"),
    "a lane that has gone": ("setp.eq.u32 %p1, %tid, 5; @%p1 ret; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1;",
                             "takes no part, by .*thread .4, 0, 0"),
    "a mask without the lane": ("shfl.sync.bfly.b32 %r1, %tid, 1, 31, 3;", "the mask leaves out"),
    "a trap": ("@%p0 trap;", "trap, by"),
    "an unknown instruction": ("bogus.u32 %r1, %r2;", "line 16: no such instruction is known: bogus.u32"),
    "an unknown modifier": ("add.rn.weird.f32 %r1, %r2, %r3;", "not known: .'weird'"),
    "an unknown register": ("mov.u32 %r1, %clusterid.x;", "no special register"),
    "a wide operand": ("add.u32 %r1, %r2, %r3; add.f32 %d1, %d2, %d3;", "has 64 bits"),
    "no end": ("ROUND: bra.uni ROUND;", "no end after"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name, monkeypatch):
    body, message = FAULTS[name]
    monkeypatch.setattr(machine, "MOST_STEPS", 5000)
    with pytest.raises(PTXError, match=message):
        run(body, 64, out=np.zeros(64, "u4"))


def test_what_is_allowed_beside_the_faults():
    for body in (
        f"{ADDRESS} st.global.u32 [%d5], %tid;",
        f"{OWN} bar.sync 0; {NEXT} ld.shared.u32 %r3, [%r2]; bar.sync 0; st.shared.u32 [%r1], 7;",
        f"{OWN} bar.warp.sync -1; {NEXT} ld.shared.u32 %r3, [%r2]; bar.warp.sync -1; st.shared.u32 [%r1], 7;",
        f"{OWN} ld.shared.u32 %r3, [%r1]; st.shared.u32 [%r1], 7;",
        "setp.lt.u32 %p1, %tid, 32; @%p1 bra OVER; shfl.sync.bfly.b32 %r1, %tid, 1, 31, -1; OVER: bar.sync 0;",
    ):
        run(body, 64, out=np.zeros(64, "u4"))
    with pytest.raises(PTXError, match="without a barrier after its write"):  # of another warp
        run(f"{OWN} bar.warp.sync -1; xor.b32 %r2, %tid, 32; mad.lo.u32 %r2, %r2, 4, memory; ld.shared.u32 %r3, [%r2];",
            64, out=np.zeros(64, "u4"))  # fmt: skip


def test_functions_are_called():
    """A function of the text, by some threads only, with memory of its own for each."""
    body = """
        and.b32 %r1, %x0, 1;  setp.eq.u32 %p1, %r1, 0;  mov.u32 %y, 1000;
        @%p1 bra OVER;
        { .param .b32 param0;  st.param.b32 [param0], %x0;  .param .b32 back;
          call.uni (back), square, (param0);
          ld.param.b32 %y, [back]; }
    OVER: add.u32 %y, %y, 1;
        ret;
    }
    .func (.param .b32 result) square(.param .b32 given)
    {
        .reg .b32 %r<9>;  .reg .b64 %d<9>;  .local .align 4 .b8 depot[8];
        ld.param.b32 %r1, [given];  mov.u64 %d1, depot;  st.local.u32 [%d1+4], %r1;
        ld.local.u32 %r2, [depot+4];  mul.lo.u32 %r3, %r1, %r2;  st.param.b32 [result], %r3;"""
    with pytest.raises(PTXError):
        computed("call.uni (%r1), nobody, (%r2);", LANES, to="u4")
    body = body.replace("ret;\n    }", "mul.wide.u32 %d5, %tid, 4;  add.s64 %d5, %d5, %out;  st.global.u32 [%d5], %y;"
                        "  ret;\n    }")  # fmt: skip
    head = ".reg .b32 %x0;  .reg .b32 %y;  mov.u32 %x0, %tid;"
    got = run(head + body, 64, out=np.zeros(64, "u4"))
    np.testing.assert_array_equal(got, np.where(LANES % 2, LANES * LANES, 1000) + 1)
