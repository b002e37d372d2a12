// The transposes of convolutions in the kernel, in parts that are added up in order (conv.cuh says how they are cut).
#include "conv.cuh"

// ---- parts[part, group, row, tap, channel] = sum over some positions of cotangent[row] * windows[tap, channel]
//
// y: the cotangent, whose y_inner is the step from image to image; target: its sizes.  Blocks: row tiles, then tiles of
// (tap, channel), then parts, then groups.
extern "C" __global__ void __launch_bounds__(256, 2)
    tg_conv_in_w(const T* __restrict__ x, const T* __restrict__ y, W* __restrict__ parts, long long many,
                 TG_GEOMETRY) {
    __shared__ __align__(16) tg_slices slices;
    __shared__ long long offsets[TILE];
    __shared__ int moves[3][TILE];
    const long long columns = static_cast<long long>(taps0) * taps1 * taps2 * inner;
    const long long positions = static_cast<long long>(images) * target0 * target1 * target2;
    const int row_tiles = (outer - 1) / TILE_ROWS + 1, tiles = static_cast<int>((columns - 1) / TILE + 1);
    const tg_split split = tg_divide(blockIdx.x, row_tiles), other = tg_divide(split.before, tiles),
                   part = tg_divide(other.before, static_cast<int>(many));
    const int first_row = static_cast<int>(split.at) * TILE_ROWS;
    const long long first_column = other.at * TILE, group = part.before;
    const long long share = ((positions + many - 1) / many + DEPTH - 1) / DEPTH * DEPTH, begin = part.at * share;
    const long long end = begin + share < positions ? begin + share : positions;

    if (threadIdx.x < TILE) {  // what tap and channel each column is of
        const long long column = first_column + threadIdx.x;
        const tg_split which = tg_divide(column < columns ? column : 0, inner);
        const tg_place tap = tg_placed(which.before, taps0, taps1, taps2);
        const int m0 = tap.q0 * space0 - pad0, m1 = tap.q1 * space1 - pad1, m2 = tap.q2 * space2 - pad2;
        moves[0][threadIdx.x] = column < columns ? m0 : -0x40000000;  // meets nothing
        moves[1][threadIdx.x] = m1;
        moves[2][threadIdx.x] = m2;
        offsets[threadIdx.x] = (group * inner + which.at) * x_channel + m0 * x0 + m1 * x1 + m2 * x2;
    }
    __syncthreads();

    // A thread loads one position of several columns and rows: neighbours read neighbouring elements.
    constexpr int LINES = THREADS / DEPTH, LOADS = TILE / LINES, ROW_LOADS = (TILE_ROWS + LINES - 1) / LINES;
    const int k = threadIdx.x % DEPTH, line = threadIdx.x / DEPTH;
    tg_place at = tg_placed(begin + k < positions ? begin + k : 0, target0, target1, target2);
    S windows[LOADS], weights[ROW_LOADS];
    tg_sums sums = {};
    const auto load = [&](long long step) {
        const bool live = begin + step * DEPTH + k < end;
        const int i0 = at.q0 * stride0, i1 = at.q1 * stride1, i2 = at.q2 * stride2;
        const T* const image = x + at.before * x_image + i0 * x0 + i1 * x1 + i2 * x2;
        const T* const from = y + at.before * y_inner + group * y_group + at.q0 * y0 + at.q1 * y1 + at.q2 * y2;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int c = line + i * LINES, k0 = i0 + moves[0][c], k1 = i1 + moves[1][c], k2 = i2 + moves[2][c];
            const bool meets = live && k0 >= 0 && k0 < source0 && k1 >= 0 && k1 < source1 && k2 >= 0 && k2 < source2;
            windows[i] = meets ? tg_sliced(image[offsets[c]]) : S{};
        }
#pragma unroll
        for (int i = 0; i < ROW_LOADS; ++i) {
            const int row = first_row + line + i * LINES;
            weights[i] = live && line + i * LINES < TILE_ROWS && row < outer ? tg_sliced(from[row * y_row]) : S{};
        }
        at.q2 += DEPTH;
        while (at.q2 >= target2) {
            at.q2 -= target2;
            if (++at.q1 < target1) continue;
            at.q1 = 0;
            if (++at.q0 < target0) continue;
            at.q0 = 0;
            ++at.before;
        }
    };
    const auto store = [&](int which) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) slices.columns[which].put(k, line + i * LINES, windows[i]);
#pragma unroll
        for (int i = 0; i < ROW_LOADS; ++i) {
            if (line + i * LINES < TILE_ROWS) slices.rows[which].put(k, line + i * LINES, weights[i]);
        }
    };
    tg_walk(slices, end > begin ? (end - begin + DEPTH - 1) / DEPTH : 0, sums, load, store);

    W* const to = parts + ((part.at * groups + group) * outer + first_row) * columns + first_column;
#pragma unroll
    for (int i = 0; i < HELD_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < HELD_COLUMNS; ++j) {
            const int row = tg_held_row(i), column = tg_held_column(j);
            if (first_row + row < outer && first_column + column < columns) to[row * columns + column] = sums.get(i, j);
        }
    }
}

// result[group, row, channel, tap] = sum of parts[part, group, row, tap, channel] over parts
extern "C" __global__ void __launch_bounds__(256)
    tg_conv_join(const W* __restrict__ parts, T* __restrict__ result, long long many, long long size, int inner,
                 int taps) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= size) return;
    const tg_split tap = tg_divide(at, taps), channel = tg_divide(tap.before, inner);
    const W* from = parts + (channel.before * taps + tap.at) * inner + channel.at;
    W sum = W(0);
    for (long long i = 0; i < many; ++i) sum = tg_plus(sum, from[i * size]);
    result[at] = tg_store<T>(sum);
}

// Few channels in a group: a block takes one of them and one row, and sums for MOST taps at a time, so that it reads the
// cotangent once for all of these.  Blocks: channels, then rows, then groups, then parts.
constexpr int MOST = sizeof(W) > 8 ? 3 : 9;

extern "C" __global__ void __launch_bounds__(256, 2)
    tg_conv_few_in_w(const T* __restrict__ x, const T* __restrict__ y, W* __restrict__ parts, long long many,
                     TG_GEOMETRY) {
    __shared__ W shared[THREADS / TG_WARP];
    __shared__ tg_place moves[MOST];  // where each tap reads, from its position on; before: the same in memory
    const tg_split channel = tg_divide(blockIdx.x, inner), row = tg_divide(channel.before, outer),
                   group = tg_divide(row.before, groups);
    const int taps = taps0 * taps1 * taps2;
    const long long positions = static_cast<long long>(images) * target0 * target1 * target2;
    const long long share = (positions + many - 1) / many, begin = group.before * share;
    const long long end = begin + share < positions ? begin + share : positions;
    const T* const image = x + (group.at * inner + channel.at) * x_channel;
    const T* const from = y + group.at * y_group + row.at * y_row;
    for (int first = 0; first < taps; first += MOST) {
        if (threadIdx.x < MOST) {
            const tg_place tap = tg_placed(first + threadIdx.x, taps0, taps1, taps2);
            const int m0 = tap.q0 * space0 - pad0, m1 = tap.q1 * space1 - pad1, m2 = tap.q2 * space2 - pad2;
            const bool is_tap = first + static_cast<int>(threadIdx.x) < taps;
            moves[threadIdx.x] = tg_place{m0 * x0 + m1 * x1 + m2 * x2, is_tap ? m0 : -0x40000000, m1, m2};
        }
        __syncthreads();
        W sums[MOST];
#pragma unroll
        for (int t = 0; t < MOST; ++t) sums[t] = W(0);
        for (long long at = begin + threadIdx.x; at < end; at += THREADS) {
            const tg_place p = tg_placed(at, target0, target1, target2);
            const int i0 = p.q0 * stride0, i1 = p.q1 * stride1, i2 = p.q2 * stride2;
            const W a = tg_load(from[p.before * y_inner + p.q0 * y0 + p.q1 * y1 + p.q2 * y2]);
            const T* const place = image + p.before * x_image + i0 * x0 + i1 * x1 + i2 * x2;
#pragma unroll
            for (int t = 0; t < MOST; ++t) {
                const int k0 = i0 + moves[t].q0, k1 = i1 + moves[t].q1, k2 = i2 + moves[t].q2;
                if (k0 < 0 || k0 >= source0 || k1 < 0 || k1 >= source1 || k2 < 0 || k2 >= source2) continue;
                sums[t] = tg_fused(a, tg_load(place[moves[t].before]), sums[t]);
            }
        }
#pragma unroll
        for (int t = 0; t < MOST; ++t) {
            const W sum = tg_block_reduce<tg_add<W>, THREADS>(sums[t], shared);
            if (threadIdx.x == 0 && first + t < taps) {
                parts[(channel.before * taps + first + t) * inner + channel.at] = sum;
            }
        }
    }
}
