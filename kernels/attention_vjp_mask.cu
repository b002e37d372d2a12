// The cotangent of the numbers added to scores, summed over what they broadcast along (where `lies.u` is 0), in order.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(TG_THREADS, TG_LEAST_BLOCKS)
    tg_attention_vjp_mask(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                          const M* __restrict__ mask, const T* __restrict__ g, const W* __restrict__ stats,
                          const W* __restrict__ means, T* __restrict__ out, const tg_lies lies) {
    TG_DYNAMIC_SHARED(unsigned char, memory);
    tg_room room{memory};
    const tg_both<ROWS> own(room);
    const tg_both<COLS> other(room);
    W *total = room.take<W>(ROWS * (COLS + 1)), *own_stats = room.take<W>(ROWS * TG_STATS);
    const bool all_n = !lies.u[0], all_heads = !lies.u[1], all_rows = !lies.u[2], all_columns = !lies.u[3];
    long long b = blockIdx.x;
    const int down = all_rows ? 1 : (lies.t + ROWS - 1) / ROWS, across = all_columns ? 1 : (lies.s + COLS - 1) / COLS;
    const int own_column = b % across * COLS, own_row = b / across % down * ROWS;
    b /= across * down;
    const int own_head = all_heads ? 0 : b % lies.heads;
    const long long own_n = all_heads ? b : b / lies.heads;
    W sums[TG_I][TG_J];
    tg_clear(sums);
    tg_place at(lies, lies.t, lies.heads);
    for (at.n = all_n ? 0 : own_n; at.n < (all_n ? lies.n : own_n + 1); ++at.n)
        for (at.head = own_head; at.head < (all_heads ? lies.heads : own_head + 1); ++at.head)
            for (int row = own_row; row < (all_rows ? lies.t : own_row + 1); row += ROWS)
                for (int column = own_column; column < (all_columns ? lies.s : own_column + 1); column += COLS) {
                    at.group = at.head / (lies.heads / lies.groups);
                    __syncthreads();
                    own.queries(q, g, lies, at, row);
                    other.keys(k, v, lies, at, column);
                    tg_fetch_stats(own_stats, stats, means, lies, at, row, ROWS);
                    __syncthreads();
                    W weights[TG_I][TG_J], back[TG_I][TG_J];
                    tg_back<false>(own, other, own_stats, mask, lies, at, row, column, weights, back);
#pragma unroll
                    for (int i = 0; i < TG_I; ++i)
#pragma unroll
                        for (int j = 0; j < TG_J; ++j) sums[i][j] += back[i][j];
                }
#pragma unroll
    for (int i = 0; i < TG_I; ++i)
#pragma unroll
        for (int j = 0; j < TG_J; ++j) total[tg_row(i) * (COLS + 1) + tg_column(j)] = sums[i][j];
    __syncthreads();
    const int height = all_rows ? 1 : ROWS, length = all_columns ? 1 : COLS;
    for (int e = threadIdx.x; e < height * length; e += TG_THREADS) {
        const int r = e / length, c = e % length;
        W sum = W(0);
        for (int i = r; i < (all_rows ? ROWS : r + 1); ++i)
            for (int j = c; j < (all_columns ? COLS : c + 1); ++j) sum += total[i * (COLS + 1) + j];
        if (own_row + r < (all_rows ? 1 : lies.t) && own_column + c < (all_columns ? 1 : lies.s)) {
            out[own_n * lies.u[0] + own_head * lies.u[1] + (own_row + r) * lies.u[2] + (own_column + c) * lies.u[3]] =
                tg_store<T>(sum);
        }
    }
}
