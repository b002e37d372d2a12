// Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), the stream of NumPy's generator.
//
// NumPy adds 1 to the counter before it makes a block, so block number n of a stream is `tg_philox_at(key, counter, n)`
// for the counter that NumPy's Philox was made with: random_raw gives word i as at[i % 4] of block i / 4.
#pragma once

#include "scalar.cuh"

struct tg_philox_block {
    unsigned long long at[4];
};

TG_INLINE unsigned long long tg_high_product(unsigned long long a, unsigned long long b) {
#ifdef TG_HOST
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
#else
    return __umul64hi(a, b);
#endif
}

// The bijection itself: ten rounds under a key of two words, of a counter of four, lowest word first.
__device__ __forceinline__ tg_philox_block tg_philox(unsigned long long key0, unsigned long long key1,
                                                     unsigned long long counter0, unsigned long long counter1,
                                                     unsigned long long counter2, unsigned long long counter3) {
#ifndef TG_HOST
    // Nothing is known of the keys from here on: else a loop would keep those of all ten rounds in 40 registers.
    asm volatile("" : "+l"(key0), "+l"(key1));
#endif
    const unsigned long long multiplier0 = 0xD2E7470EE14C6C93ull, multiplier1 = 0xCA5A826395121157ull;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long high0 = tg_high_product(multiplier0, counter0), low0 = multiplier0 * counter0;
        const unsigned long long high1 = tg_high_product(multiplier1, counter2), low1 = multiplier1 * counter2;
        counter0 = high1 ^ counter1 ^ key0;
        counter2 = high0 ^ counter3 ^ key1;
        counter1 = low1;
        counter3 = low0;
        key0 += 0x9E3779B97F4A7C15ull;  // Weyl sequences: the golden ratio, and the square root of 3
        key1 += 0xBB67AE8584CAA73Bull;
    }
    return tg_philox_block{{counter0, counter1, counter2, counter3}};
}

// Block number n of the stream of NumPy's `Philox(key=key, counter=counter)`; the counter carries over its four words.
__device__ __forceinline__ tg_philox_block tg_philox_at(unsigned long long key0, unsigned long long key1,
                                                        unsigned long long counter0, unsigned long long counter1,
                                                        unsigned long long counter2, unsigned long long counter3,
                                                        unsigned long long n) {
    n += 1;  // the number of blocks is far below 2**64 - 1
    counter0 += n;
    if (counter0 < n && ++counter1 == 0 && ++counter2 == 0) ++counter3;
    return tg_philox(key0, key1, counter0, counter1, counter2, counter3);
}

// ---- fields of a block, little endian: what a NumPy view of the words as smaller integers shows

// Word i, chosen without an index: an array that is indexed at run time would lie in memory, not in registers.
TG_INLINE unsigned long long tg_word(const tg_philox_block& words, int i) {
    const unsigned long long low = i & 1 ? words.at[1] : words.at[0], high = i & 1 ? words.at[3] : words.at[2];
    return i & 2 ? high : low;
}
TG_INLINE unsigned int tg_field32(const tg_philox_block& words, int i) {
    return static_cast<unsigned int>(tg_word(words, i / 2) >> (32 * (i % 2)));
}
TG_INLINE unsigned short tg_field16(const tg_philox_block& words, int i) {
    return static_cast<unsigned short>(tg_word(words, i / 4) >> (16 * (i % 4)));
}

// ---- uniform in [0, 1): float32 number i of the 8 in a block, from 24 bits; float64 number i of the 4, from 53

TG_INLINE float tg_unit_float32(unsigned int field) {
    return static_cast<float>(field >> 8) * 5.9604644775390625e-08f;  // 2**-24
}
TG_INLINE double tg_unit_float64(unsigned long long word) {
    return static_cast<double>(word >> 11) * 1.1102230246251565e-16;  // 2**-53
}
