// The cotangent of queries: each block has ROWS queries of one head.  It first takes the means that the other kernels of
// the derivative read of each query, and leaves them in `means`.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_q(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                       const M* __restrict__ mask, const T* __restrict__ g, const W* __restrict__ stats,
                       const T* __restrict__ result, W* __restrict__ means, T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    const tg_both<ROWS> own(room);
    const tg_both<COLS> other(room);
    W *scratch = tg_scratch(room), *own_stats = room.take<W>(ROWS * TG_STATS);
    const tg_place at(lies, lies.t, lies.heads);
    tg_take_means(own_stats, means, g, result, lies, at);
    if (!(lies.pulled & 1)) return;
    own.queries(q, g, lies, at, at.first);
    tg_fetch_kept(own_stats, stats, lies, at, at.first, ROWS);
    W sums[TG_I][TG_SUMS<KD>], scale[TG_I];
    tg_clear(sums);
    const int end = tg_end(lies, at.first);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        other.keys(k, v, lies, at, first);
        __syncthreads();
        W weights[TG_I][TG_J], back[TG_I][TG_J];
        tg_back<false>(own, other, own_stats, mask, lies, at, at.first, first, weights, back);
        tg_times<KD>(back, other.k, scratch, sums);
    }
#pragma unroll
    for (int i = 0; i < TG_I; ++i) scale[i] = static_cast<W>(lies.scale);
    const long long step = static_cast<long long>(lies.heads) * lies.width;
    tg_deliver<KD>(out + at.n * lies.t * step + at.head * lies.width, step, at.first, lies.t, lies.width, sums, scale);
}
