// Reductions of a warp and of a block, in an order that the shape alone fixes.
//
// Op: a struct with `static A identity()` and `static A join(A, A)`.  Every thread gets the result, with the same bits:
// of two partial results the one from the lower lane is always the left operand.
#pragma once

#include "scalar.cuh"

#ifndef TG_HOST
// A block's dynamic shared memory as an array; the host shim has its own.
#define TG_DYNAMIC_SHARED(type, name)                                   \
    extern __shared__ __align__(16) unsigned char tg_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(tg_dynamic_shared)
#endif

#define TG_WARP 32
#define TG_ALL_LANES 0xffffffffu

template <class A>
struct tg_add {
    static TG_INLINE A identity() { return A(0); }
    static TG_INLINE A join(A x, A y) { return tg_plus(x, y); }
};
template <class A>
struct tg_multiply {
    static TG_INLINE A identity() { return A(1); }
    static TG_INLINE A join(A x, A y) { return tg_times(x, y); }
};
template <class A>
struct tg_maximum {
    static TG_INLINE A identity() { return tg_lowest<A>(); }
    static TG_INLINE A join(A x, A y) { return tg_max(x, y); }
};
template <class A>
struct tg_minimum {
    static TG_INLINE A identity() { return tg_highest<A>(); }
    static TG_INLINE A join(A x, A y) { return tg_min(x, y); }
};
template <class A>
struct tg_logical_and {
    static TG_INLINE A identity() { return A(1); }
    static TG_INLINE A join(A x, A y) { return A(x != A(0) && y != A(0)); }
};
template <class A>
struct tg_logical_or {
    static TG_INLINE A identity() { return A(0); }
    static TG_INLINE A join(A x, A y) { return A(x != A(0) || y != A(0)); }
};

// ---- the value of lane (this ^ mask); small types travel as int

TG_INLINE float tg_shuffle_xor(float x, int mask) { return __shfl_xor_sync(TG_ALL_LANES, x, mask); }
TG_INLINE double tg_shuffle_xor(double x, int mask) { return __shfl_xor_sync(TG_ALL_LANES, x, mask); }
TG_INLINE int tg_shuffle_xor(int x, int mask) { return __shfl_xor_sync(TG_ALL_LANES, x, mask); }
TG_INLINE unsigned int tg_shuffle_xor(unsigned int x, int mask) { return __shfl_xor_sync(TG_ALL_LANES, x, mask); }
TG_INLINE long long tg_shuffle_xor(long long x, int mask) { return __shfl_xor_sync(TG_ALL_LANES, x, mask); }
TG_INLINE unsigned long long tg_shuffle_xor(unsigned long long x, int mask) {
    return __shfl_xor_sync(TG_ALL_LANES, x, mask);
}
template <typename R>
TG_INLINE tg_complex<R> tg_shuffle_xor(tg_complex<R> x, int mask) {
    return tg_complex<R>(tg_shuffle_xor(x.re, mask), tg_shuffle_xor(x.im, mask));
}
template <typename A>
TG_INLINE A tg_shuffle_xor(A x, int mask) {
    return static_cast<A>(__shfl_xor_sync(TG_ALL_LANES, static_cast<int>(x), mask));
}

// ---- reductions

// All lanes of a warp, or of each LANES (a power of 2) neighbours; every lane of the warp must come here.  Adjacent
// lanes join first, so lanes keep their order.
template <class Op, int LANES = TG_WARP, class A>
__device__ __forceinline__ A tg_warp_reduce(A value) {
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) {
        const A other = tg_shuffle_xor(value, d);
        value = (threadIdx.x & d) ? Op::join(other, value) : Op::join(value, other);
    }
    return value;
}

// All THREADS threads of a block (a multiple of 32 along x alone); every thread must come here.  `shared`: room for
// THREADS / 32 values (none for one warp), free again when this returns.
template <class Op, int THREADS, class A>
__device__ __forceinline__ A tg_block_reduce(A value, A* shared) {
    static_assert(THREADS % TG_WARP == 0 && THREADS <= 1024, "whole warps");
    constexpr int WARPS = THREADS / TG_WARP;
    value = tg_warp_reduce<Op>(value);
    if constexpr (WARPS > 1) {
        const int lane = threadIdx.x % TG_WARP, warp = threadIdx.x / TG_WARP;
        if (lane == 0) shared[warp] = value;
        __syncthreads();
        value = tg_warp_reduce<Op>(lane < WARPS ? shared[lane] : Op::identity());
        __syncthreads();
    }
    return value;
}

// ---- the last of some blocks

// Whether this block is the last of `blocks` that come here with the same `arrived`; every thread must come here.  What
// the others wrote before is then there to be read.  Which one is the last differs from run to run: the order in which it
// reads what they wrote must not.
//
// `arrived` is memory of this launch alone and may hold anything: a count is told by its upper 40 bits, which as numbers
// are a NaN or far below zero.  The last one wipes it out, so that no later launch takes it for a count of its own.
constexpr tg_uint64 TG_COUNTING = 0xfffa5c39e1ull << 24;

__device__ __forceinline__ bool tg_is_last_block(tg_uint64* arrived, unsigned int blocks) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        tg_uint64 seen = atomicAdd(arrived, 0ull), before, count;
        do {
            before = seen;
            count = (before >> 24 == TG_COUNTING >> 24 ? before : TG_COUNTING) + 1;
            seen = atomicCAS(arrived, before, count);
        } while (seen != before);
        is_last = count == TG_COUNTING + blocks;
        if (is_last) {
            atomicExch(arrived, 0ull);
            __threadfence();
        }
    }
    __syncthreads();
    return is_last;
}
