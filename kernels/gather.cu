// Elements at integer positions along one axis, the transpose of that, and rows written in place.
//
// Arrays are (before, n, width) with the axis in the middle; positions are int64 and in range.  A block's 256 threads
// are 2**lanes_log2 lanes along the width by as many rows as that leaves.  Macros T: the storage type; SUM: that of sums.
#include "scalar.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef PACK
#define PACK 1
#endif
#ifndef SUM
#define SUM T
#endif

typedef tg_wide<T>::type W;

TG_INLINE bool tg_packed(const void* p) { return PACK > 1 && reinterpret_cast<unsigned long long>(p) % 16 == 0; }

// Where row number r of (before, n) lies: most arrays are small enough for a division in 32 bits, which is far quicker.
struct tg_split {
    long long before, at;
};
TG_INLINE tg_split tg_divide(long long r, long long n) {
    if ((r | n) >> 32 == 0) {
        const unsigned int q = static_cast<unsigned int>(r) / static_cast<unsigned int>(n);
        return tg_split{q, static_cast<unsigned int>(r) - q * static_cast<unsigned int>(n)};
    }
    const long long q = r / n;
    return tg_split{q, r - q * n};
}

// out[b, k] = x[b, indices[k]]
extern "C" __global__ void __launch_bounds__(256)
    tg_take(const T* __restrict__ x, const long long* __restrict__ indices, T* __restrict__ out, long long before,
            long long n, long long count, long long width, int lanes_log2) {
    const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), rows = 256 >> lanes_log2;
    const bool packed = tg_packed(x) && tg_packed(out);
    const long long step = static_cast<long long>(gridDim.x) * rows;
    for (long long r = static_cast<long long>(blockIdx.x) * rows + (threadIdx.x >> lanes_log2); r < before * count;
         r += step) {
        const tg_split place = tg_divide(r, count);
        const T* from = x + (place.before * n + indices[place.at]) * width;
        T* to = out + r * width;
        for (long long j = static_cast<long long>(lane) * PACK; j < width; j += lanes * PACK) {
            if (packed) {
                tg_store_pack<PACK>(to + j, tg_load_pack<PACK>(from + j));
            } else {
#pragma unroll
                for (int i = 0; i < PACK; ++i) to[j + i] = from[j + i];
            }
        }
    }
}

// ---- scatter-add: out[b, i] = sum of x[b, k] over the k with index i
//
// order: all k, stably sorted by their index; starts: for each i, and for n, where its k begin in `order`.  Up to SEGMENT
// of them are added in increasing k.  More are cut into pieces of SEGMENT, counted from the first; the sums of the pieces
// are rows for the next round, which adds them up likewise.  So no thread adds more than SEGMENT rows a round, and what
// is added to what depends on the indices alone.
#define SEGMENT 256

// The columns of one result: the sum of rows order[begin] to order[end] of `from`, in that order.
TG_INLINE void tg_sum_rows(const T* __restrict__ from, const long long* __restrict__ order, long long begin,
                           long long end, SUM* __restrict__ to, long long width, int lane, int lanes, bool packed,
                           bool packed_out) {
    for (long long j = static_cast<long long>(lane) * PACK; j < width; j += lanes * PACK) {
        W sum[PACK];
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum[i] = W(0);
#pragma unroll 4
        for (long long s = begin; s < end; ++s) {
            const T* row = from + order[s] * width + j;
            tg_pack<T, PACK> values;
            if (packed) {
                values = tg_load_pack<PACK>(row);
            } else {
#pragma unroll
                for (int i = 0; i < PACK; ++i) values.at[i] = row[i];
            }
#pragma unroll
            for (int i = 0; i < PACK; ++i) sum[i] = tg_plus(sum[i], static_cast<W>(tg_load(values.at[i])));
        }
        tg_pack<SUM, PACK> result;
#pragma unroll
        for (int i = 0; i < PACK; ++i) result.at[i] = tg_store<SUM>(sum[i]);
        if (packed_out) {
            tg_store_pack<PACK>(to + j, result);
        } else {
#pragma unroll
            for (int i = 0; i < PACK; ++i) to[j + i] = result.at[i];
        }
    }
}

// The indices with up to SEGMENT rows; later: whether those without any have been written before.
extern "C" __global__ void __launch_bounds__(256)
    tg_scatter_add(const T* __restrict__ x, const long long* __restrict__ order, const long long* __restrict__ starts,
                   SUM* __restrict__ out, long long before, long long n, long long count, int later, long long width,
                   int lanes_log2) {
    const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), rows = 256 >> lanes_log2;
    const bool packed = tg_packed(x), packed_out = tg_packed(out);
    const long long step = static_cast<long long>(gridDim.x) * rows;
    for (long long r = static_cast<long long>(blockIdx.x) * rows + (threadIdx.x >> lanes_log2); r < before * n;
         r += step) {
        const tg_split place = tg_divide(r, n);
        const long long begin = starts[place.at], end = starts[place.at + 1];
        if (end - begin > SEGMENT || (later && begin == end)) continue;
        tg_sum_rows(x + place.before * count * width, order, begin, end, out + r * width, width, lane, lanes, packed,
                    packed_out);
    }
}

// pieces[i + 1] = how many pieces the rows of index i are cut into (0: they are few); pieces[0] = 0.
extern "C" __global__ void __launch_bounds__(256)
    tg_count_pieces(const long long* __restrict__ starts, long long* __restrict__ pieces, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (i > n) return;
    const long long many = i ? starts[i] - starts[i - 1] : 0;
    pieces[i] = many > SEGMENT ? (many + SEGMENT - 1) / SEGMENT : 0;
}

// out[b, p] = the sum of piece p; firsts: for each index, and for n, the number of its first piece.
extern "C" __global__ void __launch_bounds__(256, 4)
    tg_scatter_pieces(const T* __restrict__ x, const long long* __restrict__ order, const long long* __restrict__ starts,
                      const long long* __restrict__ firsts, SUM* __restrict__ out, long long before, long long n,
                      long long count, long long most, long long width, int lanes_log2) {
    const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), rows = 256 >> lanes_log2;
    const bool packed = tg_packed(x), packed_out = tg_packed(out);
    const long long step = static_cast<long long>(gridDim.x) * rows, total = firsts[n];
    for (long long r = static_cast<long long>(blockIdx.x) * rows + (threadIdx.x >> lanes_log2); r < before * most;
         r += step) {
        const tg_split place = tg_divide(r, most);
        if (place.at >= total) continue;
        long long low = 0, high = n;  // the index whose piece it is: firsts[low] <= place.at < firsts[high]
#pragma unroll 1
        while (high - low > 1) {
            const long long middle = (low + high) / 2;
            if (firsts[middle] <= place.at) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const long long begin = starts[low] + (place.at - firsts[low]) * SEGMENT;
        const long long end = starts[low + 1] - begin < SEGMENT ? starts[low + 1] : begin + SEGMENT;
        tg_sum_rows(x + place.before * count * width, order, begin, end, out + r * width, width, lane, lanes, packed,
                    packed_out);
    }
}

// found[indices[k]] = the largest such k; found holds -1 before.  A maximum of integers is the same in any order.
extern "C" __global__ void __launch_bounds__(256)
    tg_last_place(const long long* __restrict__ indices, long long* __restrict__ found, long long count) {
    const long long k = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (k < count) atomicMax(found + indices[k], k);
}

// out[rows[k]] = x[k], both of `width` columns; a row of -1 is none, others occur once.
extern "C" __global__ void __launch_bounds__(256)
    tg_put_rows(const T* __restrict__ x, const long long* __restrict__ rows, T* __restrict__ out, long long count,
                long long width, int lanes_log2) {
    const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), together = 256 >> lanes_log2;
    const bool packed = tg_packed(x) && tg_packed(out);
    const long long step = static_cast<long long>(gridDim.x) * together;
    for (long long r = static_cast<long long>(blockIdx.x) * together + (threadIdx.x >> lanes_log2); r < count;
         r += step) {
        if (rows[r] < 0) continue;
        const T* from = x + r * width;
        T* to = out + rows[r] * width;
        for (long long j = static_cast<long long>(lane) * PACK; j < width; j += lanes * PACK) {
            if (packed) {
                tg_store_pack<PACK>(to + j, tg_load_pack<PACK>(from + j));
            } else {
#pragma unroll
                for (int i = 0; i < PACK; ++i) to[j + i] = from[j + i];
            }
        }
    }
}
