// What the kernels of convolutions share: their arguments, arithmetic of places, and the products of a tile.
//
// Convolutions of 1 to 3 dimensions and their transposes are products whose columns are never in memory.  With `inner`
// channels that are summed over and `outer` ones that are computed in each group:
//
//   conv.cu        result (outer, positions) = kernel (outer, taps inner) @ windows (taps inner, positions), and its
//                  transpose in the image
//   conv_in_w.cu   kernel's cotangent (outer, taps inner) = cotangent (outer, positions) @ windows', in parts
//
// A block of 256 threads makes a tile of 8 ROWS x 128 of the result from slices of DEPTH products; while it multiplies
// one slice, the next is on its way from memory into registers.  Operands may lie as they like; results are C-contiguous.
// Sums have an order that shapes alone fix.
//
// Macros: T, the storage type; ROWS, the rows of a tile that a thread computes.
#pragma once

#include "reduce.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef ROWS
#define ROWS 8
#endif

typedef tg_wide<T>::type W;

constexpr int THREADS = 256, TILE_ROWS = 8 * ROWS, COLUMNS = 4, TILE = TG_WARP * COLUMNS;
constexpr int DEPTH = sizeof(W) > 4 ? 8 : 16, EACH = DEPTH / 2;  // of doubles half, lest a slice on its way be spilled
constexpr int GAP = sizeof(W) > 4 ? 4 : 16 / sizeof(W);  // so that lines of a slice begin in different banks
constexpr int WIDTH = TILE + GAP, HEIGHT = TILE_ROWS + GAP;

// --fmad=false forbids the compiler to contract; here a product and a sum are one operation wherever they are made.
template <typename A>
TG_INLINE A tg_fused(A a, A b, A c) {
    return tg_plus(tg_times(a, b), c);
}
TG_INLINE float tg_fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TG_INLINE double tg_fused(double a, double b, double c) { return __fma_rn(a, b, c); }
template <typename R>
TG_INLINE tg_complex<R> tg_fused(tg_complex<R> a, tg_complex<R> b, tg_complex<R> c) {
    return tg_complex<R>(tg_fused(-a.im, b.im, tg_fused(a.re, b.re, c.re)),
                         tg_fused(a.im, b.re, tg_fused(a.re, b.im, c.im)));
}

// Sizes of the source (what windows are taken of), of the target, and of the kernel; how it moves; how operands lie.
#define TG_GEOMETRY                                                                                                     \
    int images, int groups, int inner, int outer, int source0, int source1, int source2, int target0, int target1,      \
        int target2, int taps0, int taps1, int taps2, int stride0, int stride1, int stride2, int pad0, int pad1,        \
        int pad2, int space0, int space1, int space2, long long x_image, long long x_channel, long long x0,             \
        long long x1, long long x2, long long y_group, long long y_row, long long y_inner, long long y0, long long y1,  \
        long long y2

struct tg_split {
    long long before, at;
};
TG_INLINE tg_split tg_divide(long long r, int n) {
    if (r >> 32 == 0) {  // most arrays are small enough for a division in 32 bits, which is far quicker
        const unsigned int q = static_cast<unsigned int>(r) / static_cast<unsigned int>(n);
        return tg_split{q, static_cast<unsigned int>(r) - q * static_cast<unsigned int>(n)};
    }
    const long long q = r / n;
    return tg_split{q, r - q * n};
}

// Where an element of (before, length0, length1, length2) lies.
struct tg_place {
    long long before;
    int q0, q1, q2;
};
TG_INLINE tg_place tg_placed(long long at, int length0, int length1, int length2) {
    const tg_split last = tg_divide(at, length2), middle = tg_divide(last.before, length1),
                   first = tg_divide(middle.before, length0);
    return tg_place{first.before, static_cast<int>(first.at), static_cast<int>(middle.at), static_cast<int>(last.at)};
}
TG_INLINE void tg_next(tg_place& place, int length0, int length1, int length2) {
    if (++place.q2 < length2) return;
    place.q2 = 0;
    if (++place.q1 < length1) return;
    place.q1 = 0;
    if (++place.q0 < length0) return;
    place.q0 = 0;
    ++place.before;
}

// ---- the products of a tile

struct tg_slices {
    W rows[2][DEPTH][HEIGHT], columns[2][DEPTH][WIDTH];
};

TG_INLINE void tg_multiply_slice(const tg_slices& slices, int which, W (&sums)[ROWS][COLUMNS]) {
    const int row = threadIdx.x / TG_WARP * ROWS, column = threadIdx.x % TG_WARP * COLUMNS;
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
        const tg_pack<W, ROWS> a = tg_load_pack<ROWS>(&slices.rows[which][k][row]);
        const tg_pack<W, COLUMNS> b = tg_load_pack<COLUMNS>(&slices.columns[which][k][column]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) sums[i][j] = tg_fused(a.at[i], b.at[j], sums[i][j]);
        }
    }
}

TG_INLINE void tg_clear(W (&sums)[ROWS][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) sums[i][j] = W(0);
    }
}

// load(step) brings a slice into registers, store(which) puts it into shared memory.
template <class Load, class Store>
TG_INLINE void tg_walk(const tg_slices& slices, long long steps, W (&sums)[ROWS][COLUMNS], Load load, Store store) {
    if (steps == 0) return;
    load(0);
    store(0);
    __syncthreads();
    for (long long step = 0; step < steps; ++step) {
        const int which = step & 1;
        if (step + 1 < steps) load(step + 1);
        tg_multiply_slice(slices, which, sums);
        if (step + 1 < steps) store(which ^ 1);
        __syncthreads();
    }
}
