// The cotangent of queries: each block has ROWS queries of one head.  It first goes through the keys for what the other
// kernels of the derivative read of each query, and leaves it in `stats`.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_q(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                       const M* __restrict__ mask, const T* __restrict__ g, T* __restrict__ out, W* __restrict__ stats,
                       const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    const tg_both<ROWS> own(room);
    const tg_both<COLS> other(room);
    W *scratch = tg_scratch(room), *own_stats = room.take<W>(ROWS * TG_STATS);
    const tg_place at(lies, lies.t, lies.heads);
    own.queries(q, g, lies, at, at.first);
    const int end = tg_end(lies, at.first);
    W scores[TG_I][TG_J], back[TG_I][TG_J];
    {
        tg_running rows;
        W mean[TG_I], factor[TG_I];
#pragma unroll
        for (int i = 0; i < TG_I; ++i) mean[i] = W(0);
        for (int first = 0; first < end; first += COLS) {
            __syncthreads();
            other.keys(k, v, lies, at, first);
            __syncthreads();
            tg_scores<false>(own.k, other.k, mask, lies, at, at.first, first, scores);
            tg_dots<WD>(own.w, other.w, back);
            rows.take(scores, factor);
            const tg_kept<false> kept(lies, at, at.first, first);
#pragma unroll
            for (int i = 0; i < TG_I; ++i) {
                mean[i] *= factor[i];
#pragma unroll
                for (int j = 0; j < TG_J; ++j) mean[i] += scores[i][j] * (back[i][j] * kept.share(i, j));
            }
        }
        rows.inverse(factor);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            mean[i] = tg_row_sum(mean[i]) * factor[i];
            const int row = tg_row(i);
            const bool first_of_row = tg_column(0) == 0 && (!TENSOR || threadIdx.x / 32 % SPLIT == 0);
            if (!first_of_row) continue;
            W* to = own_stats + row * TG_STATS;
            to[0] = rows.most[i], to[1] = factor[i], to[2] = mean[i];
            if (at.first + row < lies.t) {
                W* all = stats + ((at.n * lies.heads + at.head) * lies.t + at.first + row) * TG_STATS;
                all[0] = to[0], all[1] = to[1], all[2] = to[2];
            }
        }
    }
    if (!(lies.pulled & 1)) return;
    W result[TG_I][TG_SUMS<KD>], scale[TG_I];
    tg_clear(result);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        other.keys(k, v, lies, at, first);
        __syncthreads();
        tg_back<false>(own, other, own_stats, mask, lies, at, at.first, first, scores, back);
        tg_times<KD>(back, other.k, scratch, result);
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i) scale[i] = static_cast<W>(lies.scale);
    const long long step = static_cast<long long>(lies.heads) * lies.width;
    tg_deliver<KD>(out + at.n * lies.t * step + at.head * lies.width, step, at.first, lies.t, lies.width, result,
                   scale);
}
