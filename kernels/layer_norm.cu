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

// With h the normalized row and d = g * gamma:  rstd * (d - mean(d) - h * mean(d * h)).  `sums`: of d and of d * h;
// `along`: d where it is held, else g.
TG_INLINE void tg_cotangent_of_row(const tg_row& row, tg_row& along, const tg_moments& m, const T* gamma,
                                   bool aligned_gamma, const tg_complex<W>& sums, T* out, bool whole) {
    const W count = static_cast<W>(row.width), mean = sums.re / count, slope = sums.im / count;
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
        tg_write(out, whole, first, v);
    });
}

// The cotangent of x alone.
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_ROOMY_BLOCKS)
    tg_layer_norm_vjp_x(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ g,
                        T* __restrict__ out, W eps, long long leads, long long rows, long long width) {
    // The two sums travel as one number of two parts.
    __shared__ W shared[TG_PARTIALS];
    __shared__ W pairs[2 * TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(x);
    const bool aligned_gamma = tg_aligned(gamma), aligned_g = tg_aligned(g);
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
            tg_cotangent_of_row(row, along, m, gamma, aligned_gamma, sums, out + start, whole);
        }
    }
}

// Sums over rows of two numbers for each column, in an order that the shape fixes: a thread adds up its columns of every
// row that it meets, then a block its warps, then the last of TG_GROUP blocks theirs, then the last group all of them.
// Of long rows (HELD 0) a block adds to memory of its own instead.  parts: (blocks, 2, width).
constexpr int TG_GROUP = 16;
constexpr int TG_JOINED = PACK > 1 ? 16 / sizeof(W) : 1;
constexpr int TG_IN_FLIGHT = sizeof(W) == 8 ? 2 : 8;  // parts on their way at a time: more doubles would be spilled

// The sum of `count` parts, each `size` numbers and `step` from the one before, by all threads: deliver(place, numbers).
template <class F>
TG_INLINE void tg_join_parts(const W* parts, int count, long long step, long long size, F deliver) {
    for (long long j = threadIdx.x * TG_JOINED; j < size; j += TG_BLOCK * TG_JOINED) {
        W total[TG_JOINED];
#pragma unroll
        for (int i = 0; i < TG_JOINED; ++i) total[i] = W(0);
#pragma unroll TG_IN_FLIGHT
        for (int c = 0; c < count; ++c) {
            const tg_pack<W, TG_JOINED> part = tg_load_pack<TG_JOINED>(parts + c * step + j);
#pragma unroll
            for (int i = 0; i < TG_JOINED; ++i) total[i] += part.at[i];
        }
        deliver(j, total);
    }
}

struct tg_column_sums {
    W kept[2][HELD > 0 ? HELD : 1][PACK];
    W* own;
    long long width;

    // own: where this block's parts lie.
    TG_INLINE tg_column_sums(W* own_, long long width_) : own(own_), width(width_) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int k = 0; k < HELD; ++k) {
#pragma unroll
                    for (int i = 0; i < PACK; ++i) kept[s][k][i] = W(0);
                }
            }
        } else {
            for (long long first = tg_row_thread() * PACK; first < width; first += ROW_THREADS * PACK) {
#pragma unroll
                for (int i = 0; i < PACK; ++i) own[first + i] = own[width + first + i] = W(0);
            }
        }
    }
    // Add to sum s of columns first, ..., which are pack k of this thread.
    TG_INLINE void add(int s, int k, long long first, const W (&values)[PACK]) {
        if constexpr (HELD > 0) {
#pragma unroll
            for (int i = 0; i < PACK; ++i) kept[s][k][i] += values[i];
        } else {
#pragma unroll
            for (int i = 0; i < PACK; ++i) own[s * width + first + i] += values[i];
        }
    }
    // This block's parts, complete, to where they lie.
    TG_INLINE void settle() {
        if constexpr (HELD > 0) {
            __shared__ W sums[TG_BLOCK_ROWS][ROW_THREADS * PACK];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int k = 0; k < HELD; ++k) {
                    const long long from = static_cast<long long>(k) * ROW_THREADS * PACK;
#pragma unroll
                    for (int i = 0; i < PACK; ++i) {
                        sums[threadIdx.x / ROW_THREADS][tg_row_thread() * PACK + i] = kept[s][k][i];
                    }
                    __syncthreads();
                    for (int j = threadIdx.x; j < ROW_THREADS * PACK; j += TG_BLOCK) {
                        W total = sums[0][j];
#pragma unroll
                        for (int r = 1; r < TG_BLOCK_ROWS; ++r) total += sums[r][j];
                        if (from + j < width) own[s * width + from + j] = total;
                    }
                    __syncthreads();
                }
            }
        }
    }
};

// The cotangents of x, gamma and beta at once.  out: (leads, rows * width + 2 * width), first that of x;
// parts: (leads, blocks, 2, width); arrived: (leads, groups of blocks + 1).
extern "C" __global__ void __launch_bounds__(TG_BLOCK, TG_ROOMY_BLOCKS)
    tg_layer_norm_vjp(const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ g,
                      T* __restrict__ out, W* __restrict__ parts, tg_uint64* __restrict__ arrived, W eps,
                      long long leads, long long rows, long long width) {
    __shared__ W shared[TG_PARTIALS];
    __shared__ W pairs[2 * TG_PARTIALS];
    const bool whole = tg_aligned(out), aligned = tg_aligned(x);
    const bool aligned_gamma = tg_aligned(gamma), aligned_g = tg_aligned(g);
    const long long size = 2 * width, blocks = gridDim.x, groups = (blocks + TG_GROUP - 1) / TG_GROUP;
    for (long long lead = blockIdx.y; lead < leads; lead += gridDim.y) {
        T* const result = out + lead * (rows * width + size);
        W* const all = parts + lead * blocks * size;
        tg_column_sums columns(all + blockIdx.x * size, width);
        for (long long r = tg_first_row(); r < rows; r += tg_row_step()) {
            tg_row row(x + r * width, width, aligned);
            const tg_moments m = tg_row_moments(row, eps, shared);
            tg_row along(g + (lead * rows + r) * width, width, aligned_g);
            tg_complex<W> sums(W(0), W(0));  // the two travel as one number
            along.each([&](int k, long long first, W(&d)[PACK]) {
                W scale[PACK], v[PACK];
                tg_read(gamma, aligned_gamma, first, scale);
                row.pack(k, first, v);
                columns.add(1, k, first, d);
#pragma unroll
                for (int i = 0; i < PACK; ++i) {
                    const W normal = (v[i] - m.mean) * m.rstd, scaled = d[i] * scale[i];
                    v[i] = normal * d[i];
                    if constexpr (HELD > 0) d[i] = scaled;
                    sums.re += scaled;
                    sums.im += scaled * normal;
                }
                columns.add(0, k, first, v);
            });
            sums = tg_row_reduce<tg_add<tg_complex<W>>>(sums, reinterpret_cast<tg_complex<W>*>(pairs));
            tg_cotangent_of_row(row, along, m, gamma, aligned_gamma, sums, result + r * width, whole);
        }
        columns.settle();
        const long long group = blockIdx.x / TG_GROUP, first = group * TG_GROUP;
        const int members = static_cast<int>(blocks - first < TG_GROUP ? blocks - first : TG_GROUP);
        tg_uint64* const counts = arrived + lead * (groups + 1);
        if (!tg_is_last_block(counts + 1 + group, members)) continue;
        W* const ours = all + first * size;
        if (groups > 1) {
            tg_join_parts(ours, members, size, size, [&](long long j, const W(&total)[TG_JOINED]) {
                for (int i = 0; i < TG_JOINED; ++i) ours[j + i] = total[i];
            });
            if (!tg_is_last_block(counts, static_cast<unsigned int>(groups))) continue;
        }
        const bool few = groups == 1;
        tg_join_parts(all, few ? members : static_cast<int>(groups), few ? size : TG_GROUP * size, size,
                      [&](long long j, const W(&total)[TG_JOINED]) {
                          for (int i = 0; i < TG_JOINED; ++i) result[rows * width + j + i] = tg_store<T>(total[i]);
                      });
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
