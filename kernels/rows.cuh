// Walking along rows: what the kernels of softmax, layer norm and cross entropy share.
//
// A row belongs to ROW_THREADS threads: one warp (then a block has eight rows) or a block.  Thread t has the packs of
// PACK elements number t, t + ROW_THREADS, ...: a cut that the shape fixes, so sums have the same order however the
// memory is aligned.  HELD packs of each thread stay in registers; 0: the row is too long and memory is read again.
//
// Macros: T, the storage type; PACK, 1 or what fills 16 bytes and divides the width; HELD; ROW_THREADS.
#pragma once

#include "reduce.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef PACK
#define PACK 1
#endif
#ifndef HELD
#define HELD 4
#endif
#ifndef ROW_THREADS
#define ROW_THREADS 32
#endif

typedef tg_wide<T>::type W;  // rows are computed in it

constexpr int TG_BLOCK = ROW_THREADS == TG_WARP ? 256 : ROW_THREADS;
// Blocks that a multiprocessor must have room for: without the hint the compiler aims at so many that it spills.  They
// leave a thread 64 registers, or 128 where rows are double or two rows are held besides statistics.
constexpr int TG_ROOMY_BLOCKS = 512 / TG_BLOCK;
constexpr int TG_BLOCKS = sizeof(W) == 8 ? TG_ROOMY_BLOCKS : 1024 / TG_BLOCK;
constexpr int TG_BLOCK_ROWS = TG_BLOCK / ROW_THREADS;
constexpr int TG_PARTIALS = ROW_THREADS / TG_WARP;

TG_INLINE int tg_row_thread() { return threadIdx.x % ROW_THREADS; }
TG_INLINE long long tg_first_row() {
    return static_cast<long long>(blockIdx.x) * TG_BLOCK_ROWS + threadIdx.x / ROW_THREADS;
}
TG_INLINE long long tg_row_step() { return static_cast<long long>(gridDim.x) * TG_BLOCK_ROWS; }

template <class Op, class A>
TG_INLINE A tg_row_reduce(A value, A* shared) {
    return tg_block_reduce<Op, ROW_THREADS>(value, shared);
}

template <typename U>
TG_INLINE bool tg_aligned(const U* p) {
    return PACK > 1 && reinterpret_cast<unsigned long long>(p) % 16 == 0;
}

TG_INLINE void tg_read(const T* row, bool aligned, long long first, W (&values)[PACK]) {
    if (aligned) {
        const tg_pack<T, PACK> pack = tg_load_pack<PACK>(row + first);
#pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = tg_load(pack.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < PACK; ++i) values[i] = tg_load(row[first + i]);
    }
}

TG_INLINE void tg_write(T* row, bool aligned, long long first, const W (&values)[PACK]) {
    if (aligned) {
        tg_pack<T, PACK> pack;
#pragma unroll
        for (int i = 0; i < PACK; ++i) pack.at[i] = tg_store<T>(values[i]);
        tg_store_pack<PACK>(row + first, pack);
    } else {
#pragma unroll
        for (int i = 0; i < PACK; ++i) row[first + i] = tg_store<T>(values[i]);
    }
}

// A row to be walked along several times.
struct tg_row {
    const T* at;
    long long width;
    bool aligned;
    W kept[HELD > 0 ? HELD : 1][PACK];

    TG_INLINE tg_row(const T* at_, long long width_, bool aligned_) : at(at_), width(width_), aligned(aligned_) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                const int first = (k * ROW_THREADS + tg_row_thread()) * PACK;
                if (first < width) tg_read(at, aligned, first, kept[k]);
            }
        }
    }

    // f(k, first, values) for each pack of this thread: its number, its place in the row, and its elements, which f may
    // change if they are kept.
    template <class F>
    TG_INLINE void each(F f) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                const int first = (k * ROW_THREADS + tg_row_thread()) * PACK;
                if (first < width) f(k, static_cast<long long>(first), kept[k]);
            }
        } else {
            for (long long first = tg_row_thread() * PACK; first < width; first += ROW_THREADS * PACK) {
                W values[PACK];
                tg_read(at, aligned, first, values);
                f(0, first, values);
            }
        }
    }

    // Pack k at place `first`, as `each` gives it.
    TG_INLINE void pack(int k, long long first, W (&values)[PACK]) const {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int i = 0; i < PACK; ++i) values[i] = kept[k][i];
        } else {
            tg_read(at, aligned, first, values);
        }
    }
};

// The largest of some elements and the sum of exp(element - largest), in one pass.  It starts at the least finite value
// rather than at -inf, so that -inf adds exp(-inf) = 0; NaN and +inf make the sum NaN, and a row of -inf has sum 0.
struct tg_softmax_state {
    W most, sum;

    TG_INLINE tg_softmax_state()
        : most(sizeof(W) == 4 ? W(-3.4028234663852886e38f) : W(-1.7976931348623157e308)), sum(W(0)) {}
    TG_INLINE void add(const W (&values)[PACK]) {
        W next = most;
#pragma unroll
        for (int i = 0; i < PACK; ++i) next = values[i] > next ? values[i] : next;
        sum *= exp(most - next);
        most = next;
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum += exp(values[i] - most);
    }
    // What all threads of the row have found together.
    TG_INLINE void join(W* shared) {
        const W largest = tg_row_reduce<tg_maximum<W>>(most, shared);
        sum = tg_row_reduce<tg_add<W>>(sum * exp(most - largest), shared);
        most = largest;
    }
};

// The same of a row; a kept row becomes exp(element - largest).
TG_INLINE tg_softmax_state tg_exponentials(tg_row& row, W* shared) {
    tg_softmax_state state;
    if constexpr (HELD > 0) {
        row.each([&](int, long long, W(&x)[PACK]) {
#pragma unroll
            for (int i = 0; i < PACK; ++i) state.most = x[i] > state.most ? x[i] : state.most;
        });
        state.most = tg_row_reduce<tg_maximum<W>>(state.most, shared);
        row.each([&](int, long long, W(&x)[PACK]) {
#pragma unroll
            for (int i = 0; i < PACK; ++i) {
                x[i] = exp(x[i] - state.most);
                state.sum += x[i];
            }
        });
        state.sum = tg_row_reduce<tg_add<W>>(state.sum, shared);
    } else {
        row.each([&](int, long long, W(&x)[PACK]) { state.add(x); });
        state.join(shared);
    }
    return state;
}

// exp(element - largest) after tg_exponentials.
TG_INLINE W tg_exponential(W x, const tg_softmax_state& state) { return HELD > 0 ? x : exp(x - state.most); }

// The mean of a row and the reciprocal of its deviation; the variance is that of the centred elements, which costs one
// more pass but does not cancel.
struct tg_moments {
    W mean, rstd;
};

TG_INLINE tg_moments tg_row_moments(tg_row& row, W eps, W* shared) {
    const W width = static_cast<W>(row.width);
    W sum = W(0), squares = W(0);
    row.each([&](int, long long, W(&x)[PACK]) {
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum += x[i];
    });
    const W mean = tg_row_reduce<tg_add<W>>(sum, shared) / width;
    row.each([&](int, long long, W(&x)[PACK]) {
#pragma unroll
        for (int i = 0; i < PACK; ++i) squares += (x[i] - mean) * (x[i] - mean);
    });
    const W variance = tg_row_reduce<tg_add<W>>(squares, shared) / width;
    return tg_moments{mean, W(1) / sqrt(variance + eps)};
}
