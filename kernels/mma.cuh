// Products of small matrices on tensor cores: the 32 lanes of a warp together compute sums += a b, with a of
// 16 x DEPTH, b of DEPTH x 8 and sums of 16 x 8 in float.  No lane holds a whole matrix; each has a few elements, its
// fragment.
//
// E, the elements of a and b: tg_float16 or tg_bfloat16 (DEPTH 16), or tg_tf32 (DEPTH 8).  The instructions and the
// places of elements are those of the PTX ISA, "Warp-level Matrix Instructions" (mma.sync, ldmatrix); they need sm_80.
//
// In which order, and how precisely, the hardware adds the DEPTH products of one instruction is not specified.  The
// host and the interpreter of PTX in tests/ add them in order, in double, and round the sum with its addend once.
#pragma once

#include "scalar.cuh"

// float32 of which 10 bits of the fraction count, the others being 0.
struct tg_tf32 {
    unsigned int bits;
};

// ---- where elements are: which of a matrix register r of a lane holds

template <class E>
struct tg_fragment {
    static constexpr int PACK = 4 / sizeof(E);  // elements of a register: neighbours in a row of a, in a column of b
    static constexpr int DEPTH = 8 * PACK;

    static TG_INLINE int a_row(int lane, int r) { return lane / 4 + 8 * (r % 2); }
    static TG_INLINE int a_column(int lane, int r) { return PACK * (lane % 4 + 4 * (r / 2)); }
    static TG_INLINE int b_row(int lane, int r) { return PACK * (lane % 4 + 4 * r); }
    static TG_INLINE int b_column(int lane) { return lane / 4; }
};
TG_INLINE int tg_sum_row(int lane, int r) { return lane / 4 + 8 * (r / 2); }
TG_INLINE int tg_sum_column(int lane, int r) { return 2 * (lane % 4) + r % 2; }

TG_INLINE int tg_lane() { return static_cast<int>(threadIdx.x % 32); }

// ---- elements

// Rounded to nearest, ties away from zero.
TG_INLINE tg_tf32 tg_to_tf32(float x) {
    tg_tf32 y;
#ifdef TG_HOST
    const unsigned int bits = __float_as_uint(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    y.bits = finite ? (bits + 0x1000u) & 0xffffe000u : x != x ? 0x7fffffffu : bits;
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y.bits) : "f"(x));
#endif
    return y;
}

// Which elements these are, and how one is made of what lies in global memory.
enum tg_operand_kind { TG_F16, TG_BF16, TG_TF32 };
template <class E>
struct tg_operand;
template <>
struct tg_operand<tg_float16> {
    static constexpr tg_operand_kind kind = TG_F16;
    static TG_INLINE tg_float16 from(tg_float16 x) { return x; }
};
template <>
struct tg_operand<tg_bfloat16> {
    static constexpr tg_operand_kind kind = TG_BF16;
    static TG_INLINE tg_bfloat16 from(tg_bfloat16 x) { return x; }
};
template <>
struct tg_operand<tg_tf32> {
    static constexpr tg_operand_kind kind = TG_TF32;
    static TG_INLINE tg_tf32 from(float x) { return tg_to_tf32(x); }
};

// The register that holds two numbers, rounded to nearest even: `low` comes first in memory.
template <class E>
TG_INLINE unsigned int tg_pair(float low, float high) {
    static_assert(sizeof(E) == 2, "two in a register");
    unsigned int pair;
#ifdef TG_HOST
    const E both[2] = {tg_store<E>(low), tg_store<E>(high)};
    __builtin_memcpy(&pair, both, sizeof pair);
#else
    if constexpr (tg_operand<E>::kind == TG_F16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
#endif
    return pair;
}

// ---- the product

template <class E>
TG_INLINE void tg_mma(float (&sums)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
#ifdef TG_HOST
    tgh_mma(tg_operand<E>::kind, a, b, sums, __FILE__, __LINE__);
#else
#define TG_MMA(form)                                                                                \
    asm volatile("mma.sync.aligned." form " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (tg_operand<E>::kind == TG_TF32) {
        TG_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
    } else if constexpr (tg_operand<E>::kind == TG_F16) {
        TG_MMA("m16n8k16.row.col.f32.f16.f16.f32");
    } else {
        TG_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
    }
#undef TG_MMA
#endif
}

// ---- fragments from shared memory
//
// `pitch`: elements from one row of memory to the next.  Rows begin at multiples of 16 bytes; banks do not conflict
// where the pitch in bytes is 16 more than a multiple of 32.  All lanes of the warp come here.

TG_INLINE unsigned int tg_register(const void* at) { return *static_cast<const unsigned int*>(at); }

// Four matrices of 8 rows of 16 bytes: lane l says where row l % 8 of matrix l / 8 is, and gets four bytes of row l / 4
// of each; TURNED: in their place two elements of 2 bytes, below each other in column l / 4.
#ifndef TG_HOST
template <bool TURNED>
TG_INLINE void tg_load_matrices(unsigned int (&to)[4], const void* row) {
    const unsigned int at = static_cast<unsigned int>(__cvta_generic_to_shared(row));
    if constexpr (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    }
}
#endif

// a: 16 rows of DEPTH elements from `tile` on.
template <class E>
TG_INLINE void tg_load_a(unsigned int (&a)[4], const E* tile, int pitch) {
    const int lane = tg_lane();
#ifdef TG_HOST
    typedef tg_fragment<E> F;
    for (int r = 0; r < 4; ++r) a[r] = tg_register(tile + F::a_row(lane, r) * pitch + F::a_column(lane, r));
#else
    tg_load_matrices<false>(a, tile + lane % 16 * pitch + lane / 16 * (16 / sizeof(E)));
#endif
}

// Two neighbouring matrices b, whose columns are the 16 rows of DEPTH elements from `tile` on.
template <class E>
TG_INLINE void tg_load_b(unsigned int (&b)[2][2], const E* tile, int pitch) {
    const int lane = tg_lane();
#ifdef TG_HOST
    typedef tg_fragment<E> F;
    for (int n = 0; n < 2; ++n)
        for (int r = 0; r < 2; ++r) {
            b[n][r] = tg_register(tile + (F::b_column(lane) + 8 * n) * pitch + F::b_row(lane, r));
        }
#else
    unsigned int found[4];
    tg_load_matrices<false>(found, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * (16 / sizeof(E)));
    b[0][0] = found[0], b[0][1] = found[1], b[1][0] = found[2], b[1][1] = found[3];
#endif
}

// Two neighbouring matrices b, whose rows are the DEPTH rows of 16 elements from `tile` on.  Of tg_tf32 row i of b is
// row tg_turned_row(i) of memory: the sums of a product, which lie in pairs, then are a fragment a as they are
// (tg_sums_as_a).
TG_INLINE int tg_turned_row(int i) { return i % 4 * 2 + i / 4; }
template <class E>
TG_INLINE void tg_load_b_turned(unsigned int (&b)[2][2], const E* tile, int pitch) {
    typedef tg_fragment<E> F;
    const int lane = tg_lane();
    if constexpr (sizeof(E) == 4) {
        for (int n = 0; n < 2; ++n)
            for (int r = 0; r < 2; ++r) {
                b[n][r] = tg_register(tile + tg_turned_row(F::b_row(lane, r)) * pitch + F::b_column(lane) + 8 * n);
            }
    } else {
#ifdef TG_HOST
        for (int n = 0; n < 2; ++n)
            for (int r = 0; r < 2; ++r) {
                const E* at = tile + F::b_row(lane, r) * pitch + F::b_column(lane) + 8 * n;
                b[n][r] = at[0].bits | static_cast<unsigned int>(at[pitch].bits) << 16;
            }
#else
        unsigned int found[4];
        tg_load_matrices<true>(found, tile + lane % 16 * pitch + lane / 16 * 8);
        b[0][0] = found[0], b[0][1] = found[1], b[1][0] = found[2], b[1][1] = found[3];
#endif
    }
}

// The sums of DEPTH / 8 neighbouring products, rounded, as a fragment a of 16 x DEPTH for tg_load_b_turned's b.
template <class E>
TG_INLINE void tg_sums_as_a(unsigned int (&a)[4], const float (*sums)[4]) {
    if constexpr (sizeof(E) == 4) {
        a[0] = tg_to_tf32(sums[0][0]).bits, a[1] = tg_to_tf32(sums[0][2]).bits;
        a[2] = tg_to_tf32(sums[0][1]).bits, a[3] = tg_to_tf32(sums[0][3]).bits;
    } else {
        a[0] = tg_pair<E>(sums[0][0], sums[0][1]), a[1] = tg_pair<E>(sums[0][2], sums[0][3]);
        a[2] = tg_pair<E>(sums[1][0], sums[1][1]), a[3] = tg_pair<E>(sums[1][2], sums[1][3]);
    }
}
