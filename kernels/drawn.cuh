// Random numbers inside emitted kernels: element i of a drawn array is a function of key, position and i alone, so any
// kernel may draw it again, and no mask is ever stored.  A pack of N neighbours shares its Philox blocks.
#pragma once

#include "philox.cuh"

// The words of a stream that a pack of N neighbours takes, PER of which are in a block; i: the number of the first.
// Packs are aligned to N, so one block holds them all where N is below PER; only its words that are needed are kept.
template <int N, int PER>
struct tg_drawn_words {
    static constexpr int share = PER / 4;                  // numbers in a word
    static constexpr int count = (N + share - 1) / share;  // words
    tg_uint64 at[count];

    __device__ __forceinline__ tg_drawn_words(tg_uint64 lo, tg_uint64 hi, tg_uint64 from, tg_uint64 i) {
#pragma unroll
        for (int b = 0; b < (N + PER - 1) / PER; ++b) {
            const tg_philox_block block = tg_philox_at(lo, hi, from, 0, 0, 0, i / PER + b);
            const int first = static_cast<int>(i & (N < PER ? PER - N : 0)) / share;
#pragma unroll
            for (int w = 0; w < (N < PER ? count : 4); ++w) at[4 * b + w] = tg_word(block, first + w);
        }
    }
    // Word w, which of a whole block need not be known when this is compiled.
    __device__ __forceinline__ tg_uint64 word(int w) const {
        if constexpr (count == 4) {
            return tg_word(tg_philox_block{{at[0], at[1], at[2], at[3]}}, w);
        } else {
            return at[w];
        }
    }
};

// Uniform in [0, 1), as tapegrad/device/numerics/bits.py maps words: float32 takes half a word of which 24 bits count.
template <typename T, int N>
struct tg_uniform;

template <int N>
struct tg_uniform<tg_float32, N> {
    static constexpr int per = 8;
    tg_drawn_words<N, per> words;
    int first;  // of one number alone: which half of the word it is

    __device__ __forceinline__ tg_uniform(tg_uint64 lo, tg_uint64 hi, tg_uint64 from, tg_uint64 i)
        : words(lo, hi, from, i), first(N == 1 ? static_cast<int>(i & 1) : 0) {}
    __device__ __forceinline__ float at(int j) const {
        const int place = first + j;
        return tg_unit_float32(static_cast<unsigned int>(words.word(N == 1 ? 0 : j / 2) >> (32 * (place & 1))));
    }
};

template <int N>
struct tg_uniform<tg_float64, N> {
    static constexpr int per = 4;
    tg_drawn_words<N, per> words;

    __device__ __forceinline__ tg_uniform(tg_uint64 lo, tg_uint64 hi, tg_uint64 from, tg_uint64 i)
        : words(lo, hi, from, i) {}
    __device__ __forceinline__ double at(int j) const { return tg_unit_float64(words.word(j)); }
};

// Sixteen bits an element, in tiles of 4096 (see LANES in tapegrad/device/numerics/bits.py): a thread that walks a tile word
// by word uses every bit of its block.
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
        : first(static_cast<int>(i & (N < 4 ? 4 - N : 0))) {
#pragma unroll
        for (int w = 0; w < count; ++w) {
            const tg_bits16_tile tile(lo, hi, at, i + 4 * w);
            words[w] = tg_word(tile.block, static_cast<int>((i + 4 * w) >> 10 & 3));
        }
    }
    __device__ __forceinline__ tg_uint16 at(int j) const {
        if constexpr (count == 1) {
            return static_cast<tg_uint16>(words[0] >> (16 * ((first + j) & 3)));
        } else {
            return static_cast<tg_uint16>(words[j >> 2] >> (16 * (j & 3)));
        }
    }
};
