// Convolutions, and with TRANSPOSED 1 their transposes in the image (conv.cuh says how they are
// cut).
//
// Of an element at place q s + r with 0 <= r < s (a phase) the transpose sums those taps t for which (r + pad - t d) is a
// multiple of s: every so many-th tap from a first one, and they read places that are evenly spaced.  So each block takes
// elements of one phase, and both directions walk along taps that step evenly through the source.
#include "conv.cuh"

#ifndef TRANSPOSED
#define TRANSPOSED 0
#endif

// The taps along an axis that a phase sums: number j is tap first + j * step, and reads place start + q + j * delta (each
// step of q being `pace` places) for the q-th of its `positions` elements.
struct tg_axis {
    int first, step, count, start, delta, pace, positions;
};
TG_INLINE tg_axis tg_axis_of(int phase, int target, int taps, int stride, int pad, int space) {
    if (!TRANSPOSED) return tg_axis{0, 1, taps, -pad, space, stride, target};
    tg_axis axis{0, 1, 0, 0, 0, 1, phase < target ? (target - phase - 1) / stride + 1 : 0};
    while (axis.first < taps && axis.first < stride && (phase + pad - axis.first * space) % stride) ++axis.first;
    while (axis.step * space % stride) ++axis.step;
    if (axis.first >= taps || (phase + pad - axis.first * space) % stride) return axis;
    axis.count = (taps - 1 - axis.first) / axis.step + 1;
    axis.start = (phase + pad - axis.first * space) / stride;
    axis.delta = -(axis.step * space / stride);
    return axis;
}

// Where a thread is along taps and channels: of its column of the windows, and of a row of the kernel.
struct tg_walker {
    int channel, j0, j1, j2;
    bool meets;
    const T *x, *y;
};

// ---- result[image, group, row, place] = sum of kernel * windows, finished; bias: (group, row), or anything; blocks: row tiles, then tiles of places, then phases
extern "C" __global__ void __launch_bounds__(256, 2)
    tg_conv(const T* __restrict__ x, const T* __restrict__ kernel, const T* __restrict__ bias, T* __restrict__ result,
            long long tiles, TG_GEOMETRY) {
    __shared__ __align__(16) tg_slices slices;
    __shared__ tg_axis axes[3];
    const int row_tiles = (outer - 1) / TILE_ROWS + 1;
    const tg_split split = tg_divide(blockIdx.x, row_tiles), other = tg_divide(split.before, static_cast<int>(tiles));
    const tg_place phase =
        tg_placed(other.before, TRANSPOSED ? stride0 : 1, TRANSPOSED ? stride1 : 1, TRANSPOSED ? stride2 : 1);
    const int group = static_cast<int>(phase.before), first_row = static_cast<int>(split.at) * TILE_ROWS;
    if (threadIdx.x == 0) {  // in shared memory, since registers are for the tile
        axes[0] = tg_axis_of(phase.q0, target0, taps0, stride0, pad0, space0);
        axes[1] = tg_axis_of(phase.q1, target1, taps1, stride1, pad1, space1);
        axes[2] = tg_axis_of(phase.q2, target2, taps2, stride2, pad2, space2);
    }
    __syncthreads();
    const tg_axis &a0 = axes[0], &a1 = axes[1], &a2 = axes[2];
    const long long columns = static_cast<long long>(images) * a0.positions * a1.positions * a2.positions;
    const long long first_column = other.at * TILE;
    if (first_column >= columns) return;
    const long long depth = static_cast<long long>(a0.count) * a1.count * a2.count * inner;

    // Of the slices a thread loads EACH products of one column of the windows and of one row of the kernel.
    const int lane = threadIdx.x % TILE, half = threadIdx.x / TILE;
    const bool has_column = first_column + lane < columns;
    const bool has_row = lane < TILE_ROWS && first_row + lane < outer;
    const tg_place mine = tg_placed(has_column ? first_column + lane : 0, a0.positions, a1.positions, a2.positions);
    const int i0 = mine.q0 * a0.pace + a0.start, i1 = mine.q1 * a1.pace + a1.start, i2 = mine.q2 * a2.pace + a2.start;
    const T* const image = x + mine.before * x_image + static_cast<long long>(group) * inner * x_channel;
    const T* const row = kernel + group * y_group + (has_row ? first_row + lane : 0) * y_row;
    tg_walker at{0, 0, 0, 0, false, x, kernel};
    const auto settle = [&]() {  // at another tap
        const int k0 = i0 + at.j0 * a0.delta, k1 = i1 + at.j1 * a1.delta, k2 = i2 + at.j2 * a2.delta;
        at.meets = has_column && k0 >= 0 && k0 < source0 && k1 >= 0 && k1 < source1 && k2 >= 0 && k2 < source2;
        at.x = image + at.channel * x_channel + k0 * x0 + k1 * x1 + k2 * x2;
        at.y = row + at.channel * y_inner + (a0.first + at.j0 * a0.step) * y0 + (a1.first + at.j1 * a1.step) * y1 +
               (a2.first + at.j2 * a2.step) * y2;
    };
    const auto skip = [&](int channels) {
        at.channel += channels;
        for (; at.channel >= inner; at.channel -= inner) {
            if (++at.j2 < a2.count) continue;
            at.j2 = 0;
            if (++at.j1 < a1.count) continue;
            at.j1 = 0;
            ++at.j0;
        }
        settle();
    };
    if (depth > 0) skip(half * EACH);

    tg_pack<S, EACH> windows, weights;
    tg_sums sums = {};
    const auto load = [&](long long step) {
        const long long left = depth - step * DEPTH - half * EACH;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            windows.at[i] = i < left && at.meets ? tg_sliced(*at.x) : S{};
            weights.at[i] = i < left && has_row ? tg_sliced(*at.y) : S{};
            if (at.channel + 1 < inner) {
                ++at.channel;
                at.x += x_channel;
                at.y += y_inner;
            } else if (i + 1 < left) {
                skip(1);
            }
        }
        if (left > DEPTH) skip(EACH);
    };
    const auto store = [&](int which) {
        slices.columns[which].put_run(half * EACH, lane, windows);
        if (lane < TILE_ROWS) slices.rows[which].put_run(half * EACH, lane, weights);
    };
    tg_walk(slices, (depth + DEPTH - 1) / DEPTH, sums, load, store);

    const long long places = static_cast<long long>(target0) * target1 * target2;
    tg_place place{};
#pragma unroll
    for (int j = 0; j < HELD_COLUMNS; ++j) {
        const long long column = first_column + tg_held_column(j);
        if (column >= columns) break;
        if (j % RUN == 0) {
            place = tg_placed(column, a0.positions, a1.positions, a2.positions);
        } else {
            tg_next(place, a0.positions, a1.positions, a2.positions);
        }
        const int t0 = TRANSPOSED ? place.q0 * stride0 + phase.q0 : place.q0,
                  t1 = TRANSPOSED ? place.q1 * stride1 + phase.q1 : place.q1,
                  t2 = TRANSPOSED ? place.q2 * stride2 + phase.q2 : place.q2;
        T* to = result + ((place.before * groups + group) * outer + first_row) * places +
                (static_cast<long long>(t0) * target1 + t1) * target2 + t2;
#pragma unroll
        for (int i = 0; i < HELD_ROWS; ++i) {
            const int row = tg_held_row(i);
            if (first_row + row >= outer) continue;
            to[row * places] = tg_finished(sums.get(i, j), bias, group * outer + first_row + row);
        }
    }
}

// ---- few channels in a group: blocks of FEW elements of one plane of the result
constexpr int FEW = 4 * THREADS;

// The place in the source that a tap reads, or -1.
TG_INLINE int tg_read_at(int q, int tap, int source, int stride, int pad, int space) {
    if (!TRANSPOSED) {
        const int i = q * stride - pad + tap * space;
        return i < source ? i : -1;
    }
    const int i = q + pad - tap * space;
    return i >= 0 && i % stride == 0 && i / stride < source ? i / stride : -1;
}

extern "C" __global__ void __launch_bounds__(256, 4)
    tg_conv_few(const T* __restrict__ x, const T* __restrict__ kernel, const T* __restrict__ bias,
                T* __restrict__ result, long long tiles, TG_GEOMETRY) {
    const long long places = static_cast<long long>(target0) * target1 * target2;
    const tg_split tile = tg_divide(blockIdx.x, static_cast<int>(tiles)), row = tg_divide(tile.before, outer),
                   group = tg_divide(row.before, groups);
    const T* const image = x + group.before * x_image + group.at * inner * x_channel;
    const T* const weights = kernel + group.at * y_group + row.at * y_row;
    for (int i = 0; i < FEW / THREADS; ++i) {
        const long long at = tile.at * FEW + i * THREADS + threadIdx.x;
        if (at >= places) return;
        const tg_place place = tg_placed(at, target0, target1, target2);
        W sum = W(0);
        for (int t0 = 0; t0 < taps0; ++t0) {
            const int k0 = tg_read_at(place.q0, t0, source0, stride0, pad0, space0);
            if (k0 < 0) continue;
            for (int t1 = 0; t1 < taps1; ++t1) {
                const int k1 = tg_read_at(place.q1, t1, source1, stride1, pad1, space1);
                if (k1 < 0) continue;
                for (int t2 = 0; t2 < taps2; ++t2) {
                    const int k2 = tg_read_at(place.q2, t2, source2, stride2, pad2, space2);
                    if (k2 < 0) continue;
                    const T* from = image + k0 * x0 + k1 * x1 + k2 * x2;
                    const T* weight = weights + t0 * y0 + t1 * y1 + t2 * y2;
                    for (int c = 0; c < inner; ++c)
                        sum = tg_fused(tg_load(weight[c * y_inner]), tg_load(from[c * x_channel]), sum);
                }
            }
        }
        result[tile.before * places + at] = tg_finished(sum, bias, group.at * outer + row.at);
    }
}
