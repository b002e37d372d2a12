// The cotangents of keys and values: each block has ROWS keys of one head of keys, which several heads of queries may
// share.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_kv(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                        const M* __restrict__ mask, const T* __restrict__ g, const W* __restrict__ stats,
                        const W* __restrict__ means, T* __restrict__ out_k, T* __restrict__ out_v, const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    const tg_both<ROWS> own(room);
    const tg_both<COLS> other(room);
    W *scratch = tg_scratch(room), *other_stats = room.take<W>(COLS * TG_STATS);
    tg_place at(lies, lies.s, lies.groups);
    own.keys(k, v, lies, at, at.first);
    W result_k[TG_I][TG_SUMS<KD>], result_v[TG_I][TG_SUMS<WD>];
    tg_clear(result_k);
    tg_clear(result_v);
    const int each = lies.heads / lies.groups;
    for (at.head = at.group * each; at.head < (at.group + 1) * each; ++at.head) {
        for (int first = lies.cut() ? at.first / COLS * COLS : 0; first < lies.t; first += COLS) {
            __syncthreads();
            other.queries(q, g, lies, at, first);
            tg_fetch_stats(other_stats, stats, means, lies, at, first, COLS);
            __syncthreads();
            W weights[TG_I][TG_J], back[TG_I][TG_J];
            tg_back<true>(own, other, other_stats, mask, lies, at, first, at.first, weights, back);
            if (lies.pulled & 4) tg_times<WD>(weights, other.w, scratch, result_v);
            if (lies.pulled & 2) tg_times<KD>(back, other.k, scratch, result_k);
        }
    }
    W factor[TG_I];
    if (lies.pulled & 2) {
#pragma unroll
        for (int i = 0; i < TG_I; ++i) factor[i] = static_cast<W>(lies.scale);
        const long long step = static_cast<long long>(lies.groups) * lies.width;
        tg_deliver<KD>(out_k + at.n * lies.s * step + at.group * lies.width, step, at.first, lies.s, lies.width,
                       result_k, factor);
    }
    if (lies.pulled & 4) {
#pragma unroll
        for (int i = 0; i < TG_I; ++i) factor[i] = W(1);
        const long long step = static_cast<long long>(lies.groups) * lies.features;
        tg_deliver<WD>(out_v + at.n * lies.s * step + at.group * lies.features, step, at.first, lies.s, lies.features,
                       result_v, factor);
    }
}
