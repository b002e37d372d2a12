// Tiles of attention: matrices in shared memory, and how the threads of a block share a tile of scores and the sums of
// its products with rows.  Two layouts have the same functions:
//
// * TENSOR 0: thread (y, x) of 8 x 16 has rows y, y + 8, ... and columns x, x + 16, ..., and multiplies number by
//   number;
// * TENSOR 1: each warp has bands of 16 rows, its lanes the places of mma.cuh's sums; SPLIT warps have the same
//   rows, and each of them its part of the columns of a product with rows, for more columns than one has registers.
//
// Numbers lie in shared memory as E: those of 16 bits as they are where tensor cores take them, float32 rounded to TF32
// there, else the type in which sums are taken.
//
// Macros: T, the storage type; ROWS and COLS of a tile of scores; TENSOR; SPLIT.
#pragma once

#include "mma.cuh"
#include "reduce.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef ROWS
#define ROWS 32
#endif
#ifndef COLS
#define COLS 32
#endif
#ifndef TENSOR
#define TENSOR 0
#endif
#ifndef SPLIT
#define SPLIT 1
#endif

typedef tg_wide<T>::type W;

template <int SIZE>
struct tg_on_tensor_cores {
    typedef T type;
};
template <>
struct tg_on_tensor_cores<4> {
    typedef tg_tf32 type;
};
#if TENSOR
typedef tg_on_tensor_cores<sizeof(T)>::type E;
TG_INLINE E tg_element(T x) { return tg_operand<E>::from(x); }
#else
typedef W E;
TG_INLINE E tg_element(T x) { return tg_load(x); }
#endif

constexpr int TG_THREADS = 128;
constexpr int TG_PAD = 16 / sizeof(E);  // rows of a tile begin in different banks

// Parts of a block's shared memory, each from a multiple of 16 bytes on.
struct tg_room {
    unsigned char* at;
    template <class A>
    TG_INLINE A* take(int count) {
        A* found = reinterpret_cast<A*>(at);
        at += (count * static_cast<int>(sizeof(A)) + 15) / 16 * 16;
        return found;
    }
    TG_INLINE E* tile(int rows, int width) { return take<E>(rows * (width + TG_PAD)); }
};

// Rows first, first + 1, ... of a matrix into a tile; zeros beyond its end.
template <int LENGTH, int WIDTH>
TG_INLINE void tg_fetch(E* tile, const T* from, long long step, int first, int rows, int width) {
    constexpr int PACK = 16 / sizeof(T), PITCH = WIDTH + TG_PAD;
    const bool packed = reinterpret_cast<unsigned long long>(from) % 16 == 0 && step % PACK == 0 && width % PACK == 0;
    if (packed) {
        for (int i = threadIdx.x; i < LENGTH * (WIDTH / PACK); i += TG_THREADS) {
            const int r = i / (WIDTH / PACK), c = i % (WIDTH / PACK) * PACK;
            tg_pack<E, PACK> elements = {};
            if (first + r < rows && c < width) {
                const tg_pack<T, PACK> values = tg_load_pack<PACK>(from + static_cast<long long>(first + r) * step + c);
#pragma unroll
                for (int p = 0; p < PACK; ++p) elements.at[p] = tg_element(values.at[p]);
            }
            tg_store_pack(tile + r * PITCH + c, elements);
        }
    } else {
        for (int i = threadIdx.x; i < LENGTH * WIDTH; i += TG_THREADS) {
            const int r = i / WIDTH, c = i % WIDTH;
            const bool there = first + r < rows && c < width;
            tile[r * PITCH + c] = there ? tg_element(from[static_cast<long long>(first + r) * step + c]) : E{};
        }
    }
}

template <int A, int B>
TG_INLINE void tg_clear(W (&sums)[A][B]) {
#pragma unroll
    for (int i = 0; i < A; ++i)
#pragma unroll
        for (int j = 0; j < B; ++j) sums[i][j] = W(0);
}

#if TENSOR

constexpr int TG_BANDS = ROWS * SPLIT / 64;  // bands of 16 rows that a warp has
constexpr int TG_I = 2 * TG_BANDS, TG_J = COLS / 4, TG_LANES = 4, TG_SIDE = 2;
static_assert(ROWS * SPLIT % 64 == 0 && COLS % 16 == 0, "whole fragments");

TG_INLINE int tg_band() { return static_cast<int>(threadIdx.x) / 32 / SPLIT * (16 * TG_BANDS); }
TG_INLINE int tg_row(int i) { return tg_band() + i / 2 * 16 + tg_sum_row(tg_lane(), i % 2 * 2); }
TG_INLINE int tg_column(int j) { return j / 2 * 8 + tg_sum_column(tg_lane(), j % 2); }
template <int WIDTH>
constexpr int TG_SUMS = WIDTH / SPLIT / 4;
template <int WIDTH>
TG_INLINE int tg_part() {
    return static_cast<int>(threadIdx.x) / 32 % SPLIT * (WIDTH / SPLIT);
}
template <int WIDTH>
TG_INLINE int tg_sum_of_column(int j) {
    return tg_part<WIDTH>() + tg_column(j);
}

template <int WIDTH>
TG_INLINE void tg_dots(const E* a, const E* b, W (&out)[TG_I][TG_J]) {
    constexpr int PITCH = WIDTH + TG_PAD, DEPTH = tg_fragment<E>::DEPTH;
    float sums[TG_BANDS][COLS / 8][4];
#pragma unroll
    for (int e = 0; e < TG_BANDS * (COLS / 8) * 4; ++e) sums[e / 4 / (COLS / 8)][e / 4 % (COLS / 8)][e % 4] = 0.0f;
#pragma unroll 2
    for (int c = 0; c < WIDTH; c += DEPTH) {
        unsigned int left[TG_BANDS][4];
#pragma unroll
        for (int m = 0; m < TG_BANDS; ++m) tg_load_a(left[m], a + (tg_band() + 16 * m) * PITCH + c, PITCH);
#pragma unroll
        for (int n = 0; n < COLS / 16; ++n) {
            unsigned int right[2][2];
            tg_load_b(right, b + 16 * n * PITCH + c, PITCH);
#pragma unroll
            for (int m = 0; m < TG_BANDS; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) tg_mma<E>(sums[m][2 * n + e], left[m], right[e]);
        }
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) out[i][j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
}

template <int WIDTH>
TG_INLINE void tg_times(const W (&p)[TG_I][TG_J], const E* b, W*, W (&out)[TG_I][TG_SUMS<WIDTH>]) {
    constexpr int PITCH = WIDTH + TG_PAD, DEPTH = tg_fragment<E>::DEPTH, EACH = DEPTH / 8;
    static_assert(WIDTH % (16 * SPLIT) == 0, "whole fragments");
#pragma unroll
    for (int k = 0; k < COLS / DEPTH; ++k) {
        unsigned int left[TG_BANDS][4];
#pragma unroll
        for (int m = 0; m < TG_BANDS; ++m) {
            float sums[EACH][4];
#pragma unroll
            for (int e = 0; e < 4 * EACH; ++e) {
                sums[e / 4][e % 4] = p[2 * m + e % 4 / 2][2 * (k * EACH + e / 4) + e % 2];
            }
            tg_sums_as_a<E>(left[m], sums);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / SPLIT / 16; ++n) {
            unsigned int right[2][2];
            tg_load_b_turned(right, b + k * DEPTH * PITCH + tg_part<WIDTH>() + 16 * n, PITCH);
#pragma unroll
            for (int m = 0; m < TG_BANDS; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float sums[4];
#pragma unroll
                    for (int r = 0; r < 4; ++r) sums[r] = out[2 * m + r / 2][4 * n + 2 * e + r % 2];
                    tg_mma<E>(sums, left[m], right[e]);
#pragma unroll
                    for (int r = 0; r < 4; ++r) out[2 * m + r / 2][4 * n + 2 * e + r % 2] = sums[r];
                }
        }
    }
}

TG_INLINE W* tg_scratch(tg_room&) { return nullptr; }

#else

constexpr int TG_X = 16, TG_Y = 8;
constexpr int TG_I = ROWS / TG_Y, TG_J = COLS / TG_X, TG_LANES = TG_X, TG_SIDE = 1;
constexpr int TG_PITCH = COLS + 1;  // of weights that threads hand to each other
static_assert(ROWS % TG_Y == 0 && COLS % TG_X == 0 && TG_X * TG_Y == TG_THREADS, "whole tiles");

TG_INLINE int tg_row(int i) { return static_cast<int>(threadIdx.x) / TG_X + TG_Y * i; }
TG_INLINE int tg_column(int j) { return static_cast<int>(threadIdx.x) % TG_X + TG_X * j; }
template <int WIDTH>
constexpr int TG_SUMS = WIDTH / TG_X;
template <int WIDTH>
TG_INLINE int tg_sum_of_column(int j) {
    return tg_column(j);
}

template <int WIDTH>
TG_INLINE void tg_dots(const E* a, const E* b, W (&out)[TG_I][TG_J]) {
    constexpr int PITCH = WIDTH + TG_PAD;
    tg_clear(out);
#pragma unroll 1
    for (int c = 0; c < WIDTH; c += TG_PAD) {
        tg_pack<E, TG_PAD> left[TG_I], right[TG_J];
#pragma unroll
        for (int i = 0; i < TG_I; ++i) left[i] = tg_load_pack<TG_PAD>(a + tg_row(i) * PITCH + c);
#pragma unroll
        for (int j = 0; j < TG_J; ++j) right[j] = tg_load_pack<TG_PAD>(b + tg_column(j) * PITCH + c);
#pragma unroll
        for (int e = 0; e < TG_PAD; ++e)
#pragma unroll
            for (int i = 0; i < TG_I; ++i)
#pragma unroll
                for (int j = 0; j < TG_J; ++j) out[i][j] = fma(left[i].at[e], right[j].at[e], out[i][j]);
    }
}

// A row of weights goes through shared memory to the lanes that have it.
template <int WIDTH>
TG_INLINE void tg_times(const W (&p)[TG_I][TG_J], const E* b, W* weights, W (&out)[TG_I][TG_SUMS<WIDTH>]) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) weights[tg_row(i) * TG_PITCH + tg_column(j)] = p[i][j];
    __syncwarp();
#pragma unroll 2
    for (int c = 0; c < COLS; ++c) {
        W left[TG_I];
#pragma unroll
        for (int i = 0; i < TG_I; ++i) left[i] = weights[tg_row(i) * TG_PITCH + c];
#pragma unroll
        for (int j = 0; j < TG_SUMS<WIDTH>; ++j) {
            const W right = b[c * (WIDTH + TG_PAD) + tg_column(j)];
#pragma unroll
            for (int i = 0; i < TG_I; ++i) out[i][j] = fma(left[i], right, out[i][j]);
        }
    }
}

TG_INLINE W* tg_scratch(tg_room& room) { return room.take<W>(ROWS * TG_PITCH); }

#endif

// tg_dots: inner products of the rows of one tile of WIDTH with those of another.
// tg_times: out += p b, where b has a row for each column of p; its weights are rounded to E.

// All lanes of a row.
TG_INLINE W tg_row_maximum(W x) { return tg_warp_reduce<tg_maximum<W>, TG_LANES>(x); }
TG_INLINE W tg_row_sum(W x) { return tg_warp_reduce<tg_add<W>, TG_LANES>(x); }

// Sums, each row times a factor, into rows first, first + 1, ... of a matrix.
template <int WIDTH>
TG_INLINE void tg_deliver(T* to, long long step, int first, int rows, int width, const W (&sums)[TG_I][TG_SUMS<WIDTH>],
                          const W (&factor)[TG_I]) {
    const bool packed = reinterpret_cast<unsigned long long>(to) % (TG_SIDE * sizeof(T)) == 0 && step % TG_SIDE == 0;
#pragma unroll
    for (int i = 0; i < TG_I; ++i) {
        const int row = first + tg_row(i);
        T* line = to + static_cast<long long>(row) * step;
#pragma unroll
        for (int j = 0; j < TG_SUMS<WIDTH>; j += TG_SIDE) {
            const int column = tg_sum_of_column<WIDTH>(j);
            tg_pack<T, TG_SIDE> values;
#pragma unroll
            for (int e = 0; e < TG_SIDE; ++e) values.at[e] = tg_store<T>(sums[i][j + e] * factor[i]);
            if (row < rows && packed && column + TG_SIDE <= width) {
                tg_store_pack(line + column, values);
            } else if (row < rows) {
#pragma unroll
                for (int e = 0; e < TG_SIDE; ++e)
                    if (column + e < width) line[column + e] = values.at[e];
            }
        }
    }
}
