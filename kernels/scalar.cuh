// Element types, their conversions, and the scalar functions that emitted kernels call.
//
// A dtype has a storage type (what lies in memory) and a compute type (what arithmetic is done in): they differ for
// tg_float16 and tg_bfloat16 only, which are computed in float and rounded to nearest even after every operation, so
// that a value has the same bits whether it was stored in between or not.  No header of the CUDA toolkit is needed.
//
// Whole kernels name their dtypes by macros such as T, which templates here call their parameters, too: such a macro must
// be a plain identifier (tg_float32, never float), which then is the parameter's name and harms nobody.
#pragma once

#ifndef TG_HOST
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

typedef bool tg_bool;
typedef signed char tg_int8;
typedef short tg_int16;
typedef int tg_int32;
typedef long long tg_int64;
typedef unsigned char tg_uint8;
typedef unsigned short tg_uint16;
typedef unsigned int tg_uint32;
typedef unsigned long long tg_uint64;
typedef float tg_float32;
typedef double tg_float64;

struct tg_float16 {
    unsigned short bits;
};
struct tg_bfloat16 {
    unsigned short bits;
};

#include "complex.cuh"

typedef tg_complex<float> tg_complex64;
typedef tg_complex<double> tg_complex128;

// ---- half floats
//
// Rounded to nearest even by the device's own instructions, also two at a time.  NaN becomes the one that they make,
// 0x7fff, here and on the host.

__device__ __forceinline__ float tg_half_to_float(unsigned short bits) {
#ifdef TG_HOST
    _Float16 h;
    __builtin_memcpy(&h, &bits, 2);
    return static_cast<float>(h);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

template <typename F>
__device__ __forceinline__ unsigned short tg_to_half(F f) {
    unsigned short bits;
#ifdef TG_HOST
    _Float16 h = static_cast<_Float16>(f);
    __builtin_memcpy(&bits, &h, 2);
    if (f != f) bits = 0x7fff;
#else
    if constexpr (sizeof(F) == 8) {  // rounded once, not to float first
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(f));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    }
#endif
    return bits;
}

// Of a processor before sm_80, which has no instruction for it, and of the host.
__device__ __forceinline__ unsigned int tg_bfloat_by_hand(unsigned int u) {
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ unsigned short tg_to_bfloat(float f) {
#if !defined(TG_HOST) && __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));  // two neighbours become one instruction
    return bits;
#else
    return static_cast<unsigned short>(tg_bfloat_by_hand(__float_as_uint(f)));
#endif
}

// The float nearest to f among those of bfloat16.  A pair of it and 0 is that float, bit by bit, in one instruction; of
// a number alone the conversion runs at a quarter of the rate (F2F), and its bits would have to be shifted.
__device__ __forceinline__ float tg_round_to_bfloat(float f) {
#if !defined(TG_HOST) && __CUDA_ARCH__ >= 800
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(f), "f"(0.0f));
    return __uint_as_float(pair);
#else
    return __uint_as_float(tg_bfloat_by_hand(__float_as_uint(f)) << 16);
#endif
}

// ---- compute types: tg_wide<T>::type, tg_load(T) and tg_store<T>(value)

template <typename T>
struct tg_wide {
    typedef T type;
};
template <>
struct tg_wide<tg_float16> {
    typedef float type;
};
template <>
struct tg_wide<tg_bfloat16> {
    typedef float type;
};

template <typename T>
__device__ __forceinline__ T tg_load(T x) {
    return x;
}
__device__ __forceinline__ float tg_load(tg_float16 x) { return tg_half_to_float(x.bits); }
__device__ __forceinline__ float tg_load(tg_bfloat16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

template <typename T>
struct tg_storing {
    template <typename U>
    static __device__ __forceinline__ T from(U x) {
        return static_cast<T>(x);
    }
};
template <>
struct tg_storing<tg_float16> {
    template <typename U>
    static __device__ __forceinline__ tg_float16 from(U x) {
        tg_float16 h;
        h.bits = tg_to_half(static_cast<float>(x));
        return h;
    }
    static __device__ __forceinline__ tg_float16 from(double x) {
        tg_float16 h;
        h.bits = tg_to_half(x);
        return h;
    }
};
template <>
struct tg_storing<tg_bfloat16> {
    template <typename U>
    static __device__ __forceinline__ tg_bfloat16 from(U x) {
        tg_bfloat16 h;
        h.bits = tg_to_bfloat(static_cast<float>(x));
        return h;
    }
};

template <typename T, typename U>
__device__ __forceinline__ T tg_store(U x) {
    return tg_storing<T>::from(x);
}

// A value as it would be after lying in memory as T, in T's compute type.
template <typename T>
struct tg_rounding {
    template <typename U>
    static __device__ __forceinline__ typename tg_wide<T>::type from(U x) {
        return tg_load(tg_store<T>(x));
    }
};
template <>
struct tg_rounding<tg_bfloat16> {
    template <typename U>
    static __device__ __forceinline__ float from(U x) {
        return tg_round_to_bfloat(static_cast<float>(x));
    }
};
template <typename T, typename U>
__device__ __forceinline__ typename tg_wide<T>::type tg_round_to(U x) {
    return tg_rounding<T>::from(x);
}

// Casts between compute types as NumPy's astype does them: a float becomes bool by != 0, a real a complex number.
template <typename T>
struct tg_casting {
    template <typename U>
    static __device__ __forceinline__ T from(U x) {
        return static_cast<T>(x);
    }
};
template <>
struct tg_casting<bool> {
    template <typename U>
    static __device__ __forceinline__ bool from(U x) {
        return x != U(0);
    }
};

template <typename T, typename U>
__device__ __forceinline__ T tg_cast(U x) {
    return tg_casting<T>::from(x);
}

// ---- packs: N elements that move as one, with a single instruction where they fill 16 bytes

template <typename T, int N>
struct alignas(sizeof(T) * N <= 16 ? sizeof(T) * N : 16) tg_pack {
    T at[N];
};

template <int N, typename T>
__device__ __forceinline__ tg_pack<T, N> tg_load_pack(const T* p) {
    return *reinterpret_cast<const tg_pack<T, N>*>(p);
}

// The same where p is not aligned: element by element.
template <int N, typename T>
__device__ __forceinline__ tg_pack<T, N> tg_load_each(const T* p) {
    tg_pack<T, N> found;
#pragma unroll
    for (int j = 0; j < N; ++j) found.at[j] = p[j];
    return found;
}

template <int N, typename T>
__device__ __forceinline__ void tg_store_pack(T* p, const tg_pack<T, N>& values) {
    *reinterpret_cast<tg_pack<T, N>*>(p) = values;
}

#include "functions.cuh"
