// What the kernels of convolutions share: their arguments, arithmetic of places, and the products of a tile.
//
// Convolutions of 1 to 3 dimensions and their transposes are products whose columns are never in memory.  With `inner`
// channels that are summed over and `outer` ones that are computed in each group:
//
//   conv.cu        result (outer, positions) = kernel (outer, taps inner) @ windows (taps inner, positions), and its
//                  transpose in the image
//   conv_in_w.cu   kernel's cotangent (outer, taps inner) = cotangent (outer, positions) @ windows', in parts
//   conv_finish.cu bias and relu, of what a library has multiplied
//
// A block of 256 threads makes a tile of 8 ROWS x 128 of the result from slices of DEPTH products; while it multiplies
// one slice, the next is on its way from memory into registers.  Operands may lie as they like; results are C-contiguous.
// Sums have an order that shapes alone fix.
//
// Macros: T, the storage type; ROWS, an eighth of the rows of a tile; TENSOR, 1 where tensor cores multiply: numbers of
// 16 bits, or of float32 10 bits of the fraction.  Processors before sm_80 multiply those otherwise, too.
#pragma once

#include "mma.cuh"
#include "reduce.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef ROWS
#define ROWS 8
#endif
#ifndef TENSOR
#define TENSOR 0
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
#if TENSOR && (defined(TG_HOST) || __CUDA_ARCH__ >= 800)
#define TG_TENSOR_CORES
#endif

typedef tg_wide<T>::type W;

constexpr int THREADS = 256, TILE_ROWS = 8 * ROWS, TILE = 128;
constexpr int DEPTH = sizeof(W) > 4 ? 8 : 16, EACH = DEPTH / 2;  // of doubles half, lest a slice on its way be spilled

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

// What is stored of a sum.  EPILOGUE 0: itself; 1: with the bias of its row; 2: of that what is above 0.  It is rounded
// after each of these, as if they were kernels of their own.
TG_INLINE T tg_finished(W sum, const T* bias, long long row) {
#if EPILOGUE == 0
    return tg_store<T>(sum);
#elif EPILOGUE == 1
    return tg_store<T>(tg_plus(tg_round_to<T>(sum), tg_load(bias[row])));
#else
    return tg_store<T>(tg_max(tg_round_to<T>(tg_plus(tg_round_to<T>(sum), tg_load(bias[row]))), W(0)));
#endif
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
//
// S: what slices hold.  A thread has HELD_ROWS x HELD_COLUMNS sums, whose places are tg_held_row(i), tg_held_column(j);
// so many as RUN of them are neighbours.

#ifdef TG_TENSOR_CORES
template <typename A>
struct tg_element {
    typedef A type;
};
template <>
struct tg_element<float> {
    typedef tg_tf32 type;
};
typedef tg_element<T>::type S;
TG_INLINE S tg_sliced(T x) { return tg_operand<S>::from(x); }

// Warps share the tile: each has MINE_ROWS x MINE_COLUMNS of it, as HIGH x WIDE sums of 16 x 8.
constexpr int MINE_ROWS = ROWS == 8 ? 32 : 16, MINE_COLUMNS = TILE * TILE_ROWS / MINE_ROWS / (THREADS / TG_WARP);
constexpr int HIGH = MINE_ROWS / 16, WIDE = MINE_COLUMNS / 8;
constexpr int HELD_ROWS = 2 * HIGH, HELD_COLUMNS = 2 * WIDE, RUN = 2;
constexpr int PITCH = DEPTH + 16 / sizeof(S);  // see mma.cuh

template <int LINES>
struct tg_slice {
    S at[LINES][PITCH];

    TG_INLINE void put(int k, int line, S value) { at[line][k] = value; }
    TG_INLINE void put_run(int k, int line, const tg_pack<S, EACH>& values) { tg_store_pack(&at[line][k], values); }
};
struct tg_sums {
    float at[HIGH][WIDE][4];

    TG_INLINE float get(int i, int j) const { return at[i / 2][j / 2][i % 2 * 2 + j % 2]; }
};
TG_INLINE int tg_mine_row() { return threadIdx.x / TG_WARP % (TILE_ROWS / MINE_ROWS) * MINE_ROWS; }
TG_INLINE int tg_mine_column() { return threadIdx.x / TG_WARP / (TILE_ROWS / MINE_ROWS) * MINE_COLUMNS; }
TG_INLINE int tg_held_row(int i) { return tg_mine_row() + i / 2 * 16 + tg_sum_row(tg_lane(), i % 2 * 2); }
TG_INLINE int tg_held_column(int j) { return tg_mine_column() + j / 2 * 8 + tg_sum_column(tg_lane(), j % 2); }

#else
typedef W S;
TG_INLINE S tg_sliced(T x) { return tg_load(x); }

constexpr int HELD_ROWS = ROWS, HELD_COLUMNS = TILE / TG_WARP, RUN = HELD_COLUMNS;
constexpr int GAP = sizeof(S) > 4 ? 4 : 16 / sizeof(S);  // so that lines of a slice begin in different banks

template <int LINES>
struct tg_slice {
    S at[DEPTH][LINES + GAP];

    TG_INLINE void put(int k, int line, S value) { at[k][line] = value; }
    TG_INLINE void put_run(int k, int line, const tg_pack<S, EACH>& values) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) at[k + i][line] = values.at[i];
    }
};
struct tg_sums {
    S at[HELD_ROWS][HELD_COLUMNS];

    TG_INLINE S get(int i, int j) const { return at[i][j]; }
};
TG_INLINE int tg_held_row(int i) { return threadIdx.x / TG_WARP * HELD_ROWS + i; }
TG_INLINE int tg_held_column(int j) { return threadIdx.x % TG_WARP * HELD_COLUMNS + j; }
#endif

struct tg_slices {
    tg_slice<TILE_ROWS> rows[2];
    tg_slice<TILE> columns[2];
};

TG_INLINE void tg_multiply_slice(const tg_slices& slices, int which, tg_sums& sums) {
#ifdef TG_TENSOR_CORES
#pragma unroll
    for (int k = 0; k < DEPTH; k += tg_fragment<S>::DEPTH) {
        unsigned int a[HIGH][4], b[WIDE / 2][2][2];
#pragma unroll
        for (int i = 0; i < HIGH; ++i) tg_load_a(a[i], &slices.rows[which].at[tg_mine_row() + i * 16][k], PITCH);
#pragma unroll
        for (int j = 0; j < WIDE / 2; ++j) {
            tg_load_b(b[j], &slices.columns[which].at[tg_mine_column() + j * 16][k], PITCH);
        }
#pragma unroll
        for (int i = 0; i < HIGH; ++i) {
#pragma unroll
            for (int j = 0; j < WIDE; ++j) tg_mma<S>(sums.at[i][j], a[i], b[j / 2][j % 2]);
        }
    }
#else
    const int row = tg_held_row(0), column = tg_held_column(0);
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
        const tg_pack<S, HELD_ROWS> a = tg_load_pack<HELD_ROWS>(&slices.rows[which].at[k][row]);
        const tg_pack<S, HELD_COLUMNS> b = tg_load_pack<HELD_COLUMNS>(&slices.columns[which].at[k][column]);
#pragma unroll
        for (int i = 0; i < HELD_ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < HELD_COLUMNS; ++j) sums.at[i][j] = tg_fused(a.at[i], b.at[j], sums.at[i][j]);
        }
    }
#endif
}

// load(step) brings a slice into registers, store(which) puts it into shared memory.
template <class Load, class Store>
TG_INLINE void tg_walk(const tg_slices& slices, long long steps, tg_sums& sums, Load load, Store store) {
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
