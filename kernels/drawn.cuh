// Random numbers inside emitted kernels: element i of a drawn array is a function of key, position and i alone, so any
// kernel may draw it again, and no mask is ever stored.  A pack of N neighbours shares its Philox blocks.
#pragma once

#include "philox.cuh"

// Uniform in [0, 1), as tapegrad/device/bits.py maps words: float32 takes half a word of which 24 bits count.
template <typename T, int N>
struct tg_uniform;

template <int N>
struct tg_uniform<tg_float32, N> {
    static constexpr int blocks = (N + 7) / 8;
    tg_philox_block words[blocks];
    int first;

    __device__ __forceinline__ tg_uniform(tg_uint64 lo, tg_uint64 hi, tg_uint64 at, tg_uint64 i)
        : first(static_cast<int>(i & 7)) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) words[b] = tg_philox_at(lo, hi, at, 0, 0, 0, (i >> 3) + b);
    }
    // Packs are aligned to N elements, so with N below 8 one block holds them all.
    __device__ __forceinline__ float at(int j) const {
        const int place = N >= 8 ? j : first + j;
        return tg_uniform_float32(words[place >> 3], place & 7);
    }
};

template <int N>
struct tg_uniform<tg_float64, N> {
    static constexpr int blocks = (N + 3) / 4;
    tg_philox_block words[blocks];
    int first;

    __device__ __forceinline__ tg_uniform(tg_uint64 lo, tg_uint64 hi, tg_uint64 at, tg_uint64 i)
        : first(static_cast<int>(i & 3)) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) words[b] = tg_philox_at(lo, hi, at, 0, 0, 0, (i >> 2) + b);
    }
    __device__ __forceinline__ double at(int j) const {
        const int place = N >= 4 ? j : first + j;
        return tg_uniform_float64(words[place >> 2], place & 3);
    }
};

// Sixteen bits an element, in tiles of 4096 (see LANES in tapegrad/device/bits.py): a thread that walks a tile word by
// word uses every bit of its block.
struct tg_bits16_tile {
    tg_philox_block block;
    __device__ __forceinline__ tg_bits16_tile(tg_uint64 lo, tg_uint64 hi, tg_uint64 at, tg_uint64 i)
        : block(tg_philox_at(lo, hi, at, 0, 0, 0, (i >> 12) * 256 + (i >> 2 & 255))) {}
};

template <typename T, int N>
struct tg_bits16 {
    static constexpr int count = (N + 3) / 4;
    tg_uint64 words[count];
    int first;

    __device__ __forceinline__ tg_bits16(tg_uint64 lo, tg_uint64 hi, tg_uint64 at, tg_uint64 i)
        : first(static_cast<int>(i & 3)) {
#pragma unroll
        for (int w = 0; w < count; ++w) {
            const tg_bits16_tile tile(lo, hi, at, i + 4 * w);
            words[w] = tile.block.at[(i + 4 * w) >> 10 & 3];
        }
    }
    __device__ __forceinline__ tg_uint16 at(int j) const {
        const int place = N >= 4 ? j : first + j;
        return static_cast<tg_uint16>(words[place >> 2] >> (16 * (place & 3)));
    }
};
