// Attention forward: each block has ROWS queries of one head.
//
// Macros: RESULT and KEEPS, what is written: the result, the statistics of each query, or both.
#include "attention.cuh"

#ifndef RESULT
#define RESULT 1
#endif
#ifndef KEEPS
#define KEEPS 0
#endif

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const M* __restrict__ mask,
                 T* __restrict__ out, W* __restrict__ stats, const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    E* queries = room.tile(ROWS, KD);
    const tg_both<COLS> other(room);
    W* scratch = tg_scratch(room);
    const tg_place at(lies, lies.t, lies.heads);
    tg_fetch<ROWS, KD>(queries, tg_head(q, lies.q, at.n, at.head), lies.q[1], at.first, lies.t, lies.width);
    tg_running rows;
    W result[TG_I][TG_SUMS<WD>], factor[TG_I];
    tg_clear(result);
    const int end = tg_end(lies, at.first);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        if (RESULT) {
            other.keys(k, v, lies, at, first);
        } else {
            tg_fetch<COLS, KD>(other.k, tg_head(k, lies.k, at.n, at.group), lies.k[1], first, lies.s, lies.width);
        }
        __syncthreads();
        W scores[TG_I][TG_J];
        tg_scores<false>(queries, other.k, mask, lies, at, at.first, first, scores);
        rows.take(scores, factor);
        if (!RESULT) continue;
        tg_shrink(result, factor);
        const tg_kept<false> kept(lies, at, at.first, first);
#pragma unroll
        for (int i = 0; i < TG_I; ++i)
#pragma unroll
            for (int j = 0; j < TG_J; ++j) scores[i][j] *= kept.share(i, j);
        tg_times<WD>(scores, other.w, scratch, result);
    }
    rows.inverse(factor);
    if (KEEPS) tg_keep_stats(stats, rows.most, factor, lies, at);
    if (!RESULT) return;
    const long long step = static_cast<long long>(lies.heads) * lies.features;
    tg_deliver<WD>(out + at.n * lies.t * step + at.head * lies.features, step, at.first, lies.t, lies.features, result,
                   factor);
}
