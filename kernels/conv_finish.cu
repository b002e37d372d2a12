// Bias and relu of a convolution that a library has multiplied, in place.  They are rounded as in conv.cu, and as kernels
// of their own: so the bits are those of a convolution without either, a sum and a maximum.
#include "conv.cuh"

// ---- result[image, row, place]; bias[row]; `size` elements, `places` in a row, `rows` in an image
extern "C" __global__ void __launch_bounds__(256, 4)
    tg_conv_finish(T* __restrict__ result, const T* __restrict__ bias, long long size, long long places,
                   long long rows) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at < size) result[at] = tg_finished(tg_load(result[at]), bias, at / places % rows);
}
