// Elements at integer positions along one axis, and the transpose of that.
//
// Arrays are (before, n, width) with the axis in the middle; positions are int64 and in range.  A block's 256 threads
// are 2**lanes_log2 lanes along the width by as many rows as that leaves.  Macro T: the storage type.
#include "scalar.cuh"

#ifndef T
#define T tg_float32
#endif
#ifndef PACK
#define PACK 1
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

// out[b, i] = sum of x[b, k] over the k with index i, in increasing k.  order: all k, stably sorted by their index;
// starts: for each i, and for n, where its k begin in `order`.
extern "C" __global__ void __launch_bounds__(256)
    tg_scatter_add(const T* __restrict__ x, const long long* __restrict__ order, const long long* __restrict__ starts,
                   T* __restrict__ out, long long before, long long n, long long count, long long width,
                   int lanes_log2) {
    const int lanes = 1 << lanes_log2, lane = threadIdx.x & (lanes - 1), rows = 256 >> lanes_log2;
    const bool packed = tg_packed(x), packed_out = tg_packed(out);
    const long long step = static_cast<long long>(gridDim.x) * rows;
    for (long long r = static_cast<long long>(blockIdx.x) * rows + (threadIdx.x >> lanes_log2); r < before * n;
         r += step) {
        const tg_split place = tg_divide(r, n);
        const T* from = x + place.before * count * width;
        const long long begin = starts[place.at], end = starts[place.at + 1];
        for (long long j = static_cast<long long>(lane) * PACK; j < width; j += lanes * PACK) {
            W sum[PACK];
#pragma unroll
            for (int i = 0; i < PACK; ++i) sum[i] = W(0);
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
            tg_pack<T, PACK> result;
#pragma unroll
            for (int i = 0; i < PACK; ++i) result.at[i] = tg_store<T>(sum[i]);
            if (packed_out) {
                tg_store_pack<PACK>(out + r * width + j, result);
            } else {
#pragma unroll
                for (int i = 0; i < PACK; ++i) out[r * width + j + i] = result.at[i];
            }
        }
    }
}

// found[indices[k]] = the largest such k; found holds -1 before.  A maximum of integers is the same in any order.
extern "C" __global__ void __launch_bounds__(256)
    tg_last_place(const long long* __restrict__ indices, long long* __restrict__ found, long long count) {
    const long long k = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    if (k < count) atomicMax(found + indices[k], k);
}
