// Cross entropy of rows of logits with integer labels; the probabilities never lie in memory.  L: the labels' type.
#include "check.cuh"
#include "rows.cuh"

#ifndef L
#define L tg_int64
#endif

// log(sum(exp(x))) - x[label] in one pass.  A row whose label is out of range gives NaN, and its number is told.
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_cross_entropy(const T* __restrict__ x, const L* __restrict__ labels, T* __restrict__ out,
                     tg_check check, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool aligned = tg_aligned(x);
    tg_wrong wrong;
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        const T* row = x + r * width;
        tg_softmax_state state;
#pragma unroll 4
        for (long long first = tg_row_thread() * PACK; first < width; first += ROW_THREADS * PACK) {
            W values[PACK];
            tg_read(row, aligned, first, values);
            state.add(values);
        }
        state.join(shared);
        if (tg_row_thread() == 0) {
            const L label = labels[r];
            const bool good = !tg_below_zero(label) && static_cast<unsigned long long>(label) <
                                                   static_cast<unsigned long long>(width);
            if (good) {
                out[r] = tg_store<T>(log(state.sum) + (state.most - tg_load(row[static_cast<long long>(label)])));
            } else {
                out[r] = tg_store<T>(static_cast<W>(NAN));
                wrong.add(r);
            }
        }
    }
    check.tell(wrong);
}

// (softmax(x) - onehot(label)) * g.  The labels have been checked on the way forward; one out of range matches nothing.
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_cross_entropy_vjp(const T* __restrict__ x, const L* __restrict__ labels, const T* __restrict__ g,
                         T* __restrict__ out, long long leads, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(x);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        const tg_softmax_state state = tg_exponentials(row, shared);
        const long long label = static_cast<long long>(labels[r]);
        for (long long lead = 0; lead < leads; ++lead) {
            const W ct = tg_load(g[lead * rows + r]), scale = ct / state.sum;
            row.each([&](int, long long first, W(&e)[PACK]) {
                W result[PACK];
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    result[i] = tg_exponential(e[i], state) * scale;
                    if (first + i == label) result[i] -= ct;
                }
                tg_write(out + (lead * rows + r) * width, whole, first, result);
            });
        }
    }
}
