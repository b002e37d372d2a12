// The Philox stream in memory: raw words, and uniform floats.  One thread makes one block of four words.
#include "philox.cuh"

#ifndef T
#define T tg_float32
#endif

// Words 0 .. n - 1 of the stream.
extern "C" __global__ void __launch_bounds__(256)
    tg_random_words(unsigned long long* out, long long n, unsigned long long key0, unsigned long long key1,
                    unsigned long long counter0, unsigned long long counter1, unsigned long long counter2,
                    unsigned long long counter3) {
    const long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (block * 4 >= n) return;
    const tg_philox_block words = tg_philox_at(key0, key1, counter0, counter1, counter2, counter3, block);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (block * 4 + i < n) out[block * 4 + i] = words.at[i];
    }
}

TG_INLINE float tg_uniform_of(const tg_philox_block& words, int i, float) { return tg_uniform_float32(words, i); }
TG_INLINE double tg_uniform_of(const tg_philox_block& words, int i, double) { return tg_uniform_float64(words, i); }

// n uniform numbers; T: tg_float32 (eight of a block) or tg_float64 (four).
extern "C" __global__ void __launch_bounds__(256)
    tg_random_uniform(T* out, long long n, unsigned long long key0, unsigned long long key1,
                      unsigned long long counter0, unsigned long long counter1, unsigned long long counter2,
                      unsigned long long counter3) {
    constexpr int EACH = 32 / sizeof(T);
    const long long block = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long first = block * EACH;
    if (first >= n) return;
    const tg_philox_block words = tg_philox_at(key0, key1, counter0, counter1, counter2, counter3, block);
    constexpr int PACK = 16 / sizeof(T);
    if (first + EACH <= n && reinterpret_cast<unsigned long long>(out) % 16 == 0) {
#pragma unroll
        for (int p = 0; p < EACH; p += PACK) {
            tg_pack<T, PACK> values;
#pragma unroll
            for (int i = 0; i < PACK; ++i) values.at[i] = tg_uniform_of(words, p + i, T());
            tg_store_pack<PACK>(out + first + p, values);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (first + i < n) out[first + i] = tg_uniform_of(words, i, T());
    }
}
