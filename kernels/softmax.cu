// Softmax over rows, its logarithm, and the derivatives of both.  `leads`: cotangents that share the rows of the value.
#include "rows.cuh"

// y = exp(x) / sum(exp(x))
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_softmax(const T* __restrict__ x, T* __restrict__ y, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(y), aligned = tg_aligned(x);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        const tg_softmax_state state = tg_exponentials(row, shared);
        const W scale = W(1) / state.sum;  // one division a row; the sum is in [1, width]
        row.each([&](int, long long first, W(&e)[PACK]) {
            W result[PACK];
#pragma unroll
            for (int i = 0; i < PACK; ++i) result[i] = tg_exponential(e[i], state) * scale;
            tg_write(y + r * width, whole, first, result);
        });
    }
}

// (g - sum(y * g)) * y
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_softmax_vjp(const T* __restrict__ y, const T* __restrict__ g, T* __restrict__ out, long long leads,
                   long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(y), aligned_g = tg_aligned(g);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(y + r * width, width, aligned);
        for (long long lead = 0; lead < leads; ++lead) {
            const long long start = (lead * rows + r) * width;
            tg_row along(g + start, width, aligned_g);
            W total = W(0);
            along.each([&](int k, long long first, W(&d)[PACK]) {
                W v[PACK];
                row.pack(k, first, v);
#pragma unroll
                for (int i = 0; i < PACK; ++i) total += v[i] * d[i];
            });
            total = tg_row_reduce<tg_add<W>>(total, shared);
            along.each([&](int k, long long first, W(&d)[PACK]) {
                W v[PACK];
                row.pack(k, first, v);
#pragma unroll
                for (int i = 0; i < PACK; ++i) v[i] = (d[i] - total) * v[i];
                tg_write(out + start, whole, first, v);
            });
        }
    }
}

// y = x - log(sum(exp(x)))
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_log_softmax(const T* __restrict__ x, T* __restrict__ y, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(y), aligned = tg_aligned(x);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        tg_softmax_state state;
        row.each([&](int, long long, W(&v)[PACK]) { state.add(v); });  // online: the elements are still wanted
        state.join(shared);
        // 0 (or NaN) where there is an infinity at the top, for the sum tells
        const W scale = log(state.sum);
        row.each([&](int, long long first, W(&v)[PACK]) {
            W result[PACK];
#pragma unroll
            for (int i = 0; i < PACK; ++i) result[i] = v[i] - state.most - scale;
            tg_write(y + r * width, whole, first, result);
        });
    }
}

// g - exp(y) * sum(g)
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_log_softmax_vjp(const T* __restrict__ y, const T* __restrict__ g, T* __restrict__ out, long long leads,
                       long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(y), aligned_g = tg_aligned(g);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        for (long long lead = 0; lead < leads; ++lead) {
            const long long start = (lead * rows + r) * width;
            tg_row along(g + start, width, aligned_g);
            W total = W(0);
            along.each([&](int, long long, W(&d)[PACK]) {
#pragma unroll
                for (int i = 0; i < PACK; ++i) total += d[i];
            });
            total = tg_row_reduce<tg_add<W>>(total, shared);
            along.each([&](int, long long first, W(&d)[PACK]) {
                W v[PACK];
                tg_read(y + r * width, aligned, first, v);
#pragma unroll
                for (int i = 0; i < PACK; ++i) v[i] = d[i] - exp(v[i]) * total;
                tg_write(out + start, whole, first, v);
            });
        }
    }
}
