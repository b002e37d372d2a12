// Attention in forward mode: along the tangent u of queries, keys or the numbers added to scores (`lies.of`: 0, 1, 3).
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(TG_THREADS, 2)
    tg_attention_jvp(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                     const M* __restrict__ mask, const T* __restrict__ u, T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    E* queries = room.tile(ROWS, KD);
    const tg_both<COLS> other(room);
    E* tangents = room.tile(lies.of == 1 ? COLS : ROWS, KD);
    W* scratch = tg_scratch(room);
    const tg_place at(lies, lies.t, lies.heads);
    const long long of_u[3] = {lies.u[0], lies.u[1], lies.u[2]};
    tg_fetch<ROWS, KD>(queries, tg_head(q, lies.q, at.n, at.head), lies.q[1], at.first, lies.t, lies.width);
    if (lies.of == 0) {
        tg_fetch<ROWS, KD>(tangents, tg_head(u, of_u, at.n, at.head), lies.u[1], at.first, lies.t, lies.width);
    }
    tg_running rows;
    // The scores' tangents are taken from their mean so far, `shift`: rounded weights times what all tangents of a row
    // have in common would not cancel.
    W mean[TG_I], shift[TG_I], factor[TG_I], result[TG_I][TG_SUMS<WD>], by[TG_I][TG_SUMS<WD>];
    tg_clear(result);
    tg_clear(by);
#pragma unroll
    for (int i = 0; i < TG_I; ++i) mean[i] = shift[i] = W(0);
    const int end = tg_end(lies, at.first);
    for (int first = 0; first < end; first += COLS) {
        __syncthreads();
        other.keys(k, v, lies, at, first);
        if (lies.of == 1) {
            tg_fetch<COLS, KD>(tangents, tg_head(u, of_u, at.n, at.group), lies.u[1], first, lies.s, lies.width);
        }
        __syncthreads();
        W scores[TG_I][TG_J], along[TG_I][TG_J];
        tg_scores<false>(queries, other.k, mask, lies, at, at.first, first, scores);
        if (lies.of == 0) tg_dots<KD>(tangents, other.k, along);
        if (lies.of == 1) tg_dots<KD>(queries, tangents, along);
        rows.take(scores, factor);
        tg_shrink(result, factor);
        tg_shrink(by, factor);
        const tg_kept<false> kept(lies, at, at.first, first);
#pragma unroll
        for (int i = 0; i < TG_I; ++i) {
            mean[i] *= factor[i];
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                if (lies.of == 3) {
                    const int query = at.first + tg_row(i), key = first + tg_column(j);
                    along[i][j] = query < lies.t && key < lies.s ? tg_added(u, lies.u, at, query, key) : W(0);
                } else {
                    along[i][j] *= static_cast<W>(lies.scale);
                }
                mean[i] += scores[i][j] * along[i][j];
            }
            const W weight = tg_row_sum(rows.total[i]), sum = tg_row_sum(mean[i]);
            const W next = weight == W(0) ? W(0) : sum / weight;
#pragma unroll
            for (int j = 0; j < TG_SUMS<WD>; ++j) result[i][j] -= (next - shift[i]) * by[i][j];
            shift[i] = next;
#pragma unroll
            for (int j = 0; j < TG_J; ++j) {
                scores[i][j] *= kept.share(i, j);
                along[i][j] = scores[i][j] * (along[i][j] - next);
            }
        }
        tg_times<WD>(along, other.w, scratch, result);
        tg_times<WD>(scores, other.w, scratch, by);
    }
    rows.inverse(factor);
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
        if (tg_blind(lies, rows.most[i])) factor[i] = W(0);
    const long long step = static_cast<long long>(lies.heads) * lies.features;
    tg_deliver<WD>(out + at.n * lies.t * step + at.head * lies.features, step, at.first, lies.t, lies.features, result,
                   factor);
}
