// Products with sparse matrices.  One thread adds up one element of the result, so its bits depend on nothing else.
//
// Positions are int64 and in range.  Macro T: the storage type.
#include "scalar.cuh"

#ifndef T
#define T tg_float32
#endif

typedef tg_wide<T>::type W;

// out[b, i, j] = sum over s in [starts[i], starts[i + 1]) of data[b, order[s]] * dense[b, places[s], j], where `dense` is
// (rows, width) in each of the batches.  A step of 0 reads one batch for all.
extern "C" __global__ void __launch_bounds__(256)
    tg_sparse_matmul(const T* __restrict__ data, const T* __restrict__ dense, const long long* __restrict__ order,
                     const long long* __restrict__ places, const long long* __restrict__ starts, T* __restrict__ out,
                     long long batches, long long n, long long width, long long data_step, long long dense_step) {
    const long long total = batches * n * width, step = static_cast<long long>(gridDim.x) * 256;
    for (long long r = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; r < total; r += step) {
        const long long row = r / width, j = r - row * width, batch = row / n, i = row - batch * n;
        const T* values = data + batch * data_step;
        const T* from = dense + batch * dense_step + j;
        W sum = W(0);
        for (long long s = starts[i], end = starts[i + 1]; s < end; ++s) {
            const W value = static_cast<W>(tg_load(values[order[s]]));
            sum = tg_plus(sum, tg_times(value, static_cast<W>(tg_load(from[places[s] * width]))));
        }
        out[r] = tg_store<T>(sum);
    }
}

// out[b, s] = sum over j of x[b, rows[s], j] * y[b, places[s], j]
extern "C" __global__ void __launch_bounds__(256)
    tg_sampled_product(const T* __restrict__ x, const T* __restrict__ y, const long long* __restrict__ rows,
                       const long long* __restrict__ places, T* __restrict__ out, long long batches, long long count,
                       long long width, long long x_step, long long y_step) {
    const long long total = batches * count, step = static_cast<long long>(gridDim.x) * 256;
    for (long long r = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; r < total; r += step) {
        const long long batch = r / count, s = r - batch * count;
        const T* left = x + batch * x_step + rows[s] * width;
        const T* right = y + batch * y_step + places[s] * width;
        W sum = W(0);
        for (long long j = 0; j < width; ++j) {
            sum = tg_plus(sum, tg_times(static_cast<W>(tg_load(left[j])), static_cast<W>(tg_load(right[j]))));
        }
        out[r] = tg_store<T>(sum);
    }
}
