// Layer normalization over rows, and its derivatives.  `leads`: cotangents that share the rows of x.
#include "rows.cuh"

// (x - mean) * rstd * gamma + beta
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_layer_norm(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ beta,
                  T* __restrict__ out, W eps, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(x);
    const bool aligned_gamma = tg_aligned(gamma), aligned_beta = tg_aligned(beta);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        const tg_moments m = tg_row_moments(row, eps, shared);
        row.each([&](int, long long first, W(&v)[PACK]) {
            W scale[PACK], shift[PACK];
            tg_read(gamma, aligned_gamma, first, scale);
            tg_read(beta, aligned_beta, first, shift);
#pragma unroll
            for (int i = 0; i < PACK; ++i) scale[i] = (v[i] - m.mean) * m.rstd * scale[i] + shift[i];
            tg_write(out + r * width, whole, first, scale);
        });
    }
}

// With h the normalized row and d = g * gamma:  rstd * (d - mean(d) - h * mean(d * h))
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_ROOMY_BLOCKS)
    tg_layer_norm_vjp_x(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ g,
                        T* __restrict__ out, W eps, long long leads, long long rows, long long width) {
    // The two sums travel as one number of two parts.
    __shared__ W shared[TG_PARTIALS];
    __shared__ W pairs[2 * TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(x);
    const bool aligned_gamma = tg_aligned(gamma), aligned_g = tg_aligned(g);
    const W count = static_cast<W>(width);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        const tg_moments m = tg_row_moments(row, eps, shared);
        for (long long lead = 0; lead < leads; ++lead) {
            const long long start = (lead * rows + r) * width;
            tg_row along(g + start, width, aligned_g);
            tg_complex<W> sums(W(0), W(0));
            along.each([&](int k, long long first, W(&d)[PACK]) {
                W scale[PACK], v[PACK];
                tg_read(gamma, aligned_gamma, first, scale);
                row.pack(k, first, v);
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    const W scaled = d[i] * scale[i];
                    if constexpr (HELD > 0) d[i] = scaled;
                    sums.re += scaled;
                    sums.im += scaled * ((v[i] - m.mean) * m.rstd);
                }
            });
            sums = tg_row_reduce<tg_add<tg_complex<W>>>(sums, reinterpret_cast<tg_complex<W>*>(pairs));
            const W mean = sums.re / count, slope = sums.im / count;
            along.each([&](int k, long long first, W(&d)[PACK]) {
                W v[PACK];
                row.pack(k, first, v);
                if constexpr (HELD == 0) {
                    W scale[PACK];
                    tg_read(gamma, aligned_gamma, first, scale);
#pragma unroll
                    for (int i = 0; i < PACK; ++i) d[i] *= scale[i];
                }
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    v[i] = (d[i] - mean - (v[i] - m.mean) * m.rstd * slope) * m.rstd;
                }
                tg_write(out + start, whole, first, v);
            });
        }
    }
}

// The mean and the reciprocal deviation of each row, for the sums over rows below.
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_BLOCKS)
    tg_layer_norm_moments(const T* __restrict__ x, W* __restrict__ mean, W* __restrict__ rstd, W eps, long long rows,
                          long long width) {
    __shared__ W shared[TG_PARTIALS];
    const bool aligned = tg_aligned(x);
    for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
        tg_row row(x + r * width, width, aligned);
        const tg_moments m = tg_row_moments(row, eps, shared);
        if (tg_row_thread() == 0) {
            mean[r] = m.mean;
            rstd[r] = m.rstd;
        }
    }
}

// The sum over rows of h * g, in two stages.  First block (column tile, chunk of rows, lead) sums its chunk: warp w the
// chunk's rows w, w + 8, ..., then the eight in order.  partials: (chunks, leads, width).
extern "C" __global__ void __launch_bounds__(256, 4)
    tg_layer_norm_vjp_gamma(const T* __restrict__ x, const T* __restrict__ g, const W* __restrict__ mean,
                            const W* __restrict__ rstd, W* __restrict__ partials, long long leads, long long rows,
                            long long width, long long chunk) {
    __shared__ W sums[8][TG_WARP * PACK + 1];
    const int lane = threadIdx.x % TG_WARP, warp = threadIdx.x / TG_WARP;
    const bool aligned = tg_aligned(x), aligned_g = tg_aligned(g);
    const long long column = (static_cast<long long>(blockIdx.x) * TG_WARP + lane) * PACK;
    const long long begin = blockIdx.y * chunk, end = begin + chunk < rows ? begin + chunk : rows;
    for (long long lead = blockIdx.z; lead < leads; lead += gridDim.z) {
        W sum[PACK];
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum[i] = W(0);
        if (column < width) {
            for (long long r = begin + warp; r < end; r += 8) {
                W v[PACK], d[PACK];
                tg_read(x + r * width, aligned, column, v);
                tg_read(g + (lead * rows + r) * width, aligned_g, column, d);
                const W centre = mean[r], scale = rstd[r];
#pragma unroll
                for (int i = 0; i < PACK; ++i) sum[i] += (v[i] - centre) * scale * d[i];
            }
        }
#pragma unroll
        for (int i = 0; i < PACK; ++i) sums[warp][lane * PACK + i] = sum[i];
        __syncthreads();
        for (int j = threadIdx.x; j < TG_WARP * PACK; j += 256) {
            const long long where = static_cast<long long>(blockIdx.x) * TG_WARP * PACK + j;
            W total = sums[0][j];
#pragma unroll
            for (int w = 1; w < 8; ++w) total += sums[w][j];
            if (where < width) partials[(blockIdx.y * leads + lead) * width + where] = total;
        }
        __syncthreads();
    }
}

// Then the chunks are added in order; one thread for each of `n` = leads * width results.
extern "C" __global__ void __launch_bounds__(256)
    tg_layer_norm_vjp_gamma_sum(const W* __restrict__ partials, T* __restrict__ out, long long chunks, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n) return;
    W total = W(0);
    for (long long c = 0; c < chunks; ++c) total += partials[c * n + i];
    out[i] = tg_store<T>(total);
}
