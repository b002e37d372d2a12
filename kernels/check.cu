// Are integers within bounds?  T: their storage type.
#include "check.cuh"

#ifndef T
#define T tg_int64
#endif

// A number beyond 2**63 - 1 counts as that.
TG_INLINE long long tg_signed(T x) {
    const unsigned long long most = 0x7fffffffffffffffULL;
    if (static_cast<T>(-1) > static_cast<T>(0) && static_cast<unsigned long long>(x) > most) return most;
    return static_cast<long long>(x);
}

extern "C" __global__ void tg_within(const T* __restrict__ x, tg_check check, long long n) {
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    tg_wrong wrong;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const long long value = tg_signed(x[i]);
        if (value < check.low || value > check.high) wrong.add(value);
    }
    check.tell(wrong);
}
