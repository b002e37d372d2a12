// The device side of CUDA C++ for a host compiler: read before every kernel, from a precompiled header.
// Kernels see TG_HOST defined here, and TG_CHECK where every access to memory is watched.
#pragma once

#define TG_HOST 1

#include "runtime.h"
#include "cuda_math.h"
#include "cuda_vector.h"

// Never inlined, so that the unwatched trampoline cannot swallow the watched kernel.
#define __global__ __attribute__((visibility("default"), noinline))
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
// Thread-local, not plain static: a library's thread-local block then holds its __shared__ variables and nothing
// else, so the runtime can find, poison and watch them. One OS thread runs a launch, so all CUDA threads see the same.
#define __shared__ static __thread
// The one portable spelling of dynamic shared memory: `extern __shared__` has no meaning to a host compiler.
#define TG_DYNAMIC_SHARED(type, name) type *const name = reinterpret_cast<type *>(tg_dynamic_shared)

// Constant: no thread sees its own coordinates change, so the compiler may keep them in registers over a barrier.
extern "C" const uint3 threadIdx, blockIdx;
extern "C" const dim3 blockDim, gridDim;
extern "C" unsigned char tg_dynamic_shared[];
static const int warpSize = 32;

#define TGH_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

static inline void __syncthreads(TGH_PLACE) { tgh_barrier(TGH_VOTE_NONE, 0, file, line); }
static inline int __syncthreads_and(int value, TGH_PLACE) { return tgh_barrier(TGH_VOTE_AND, value != 0, file, line); }
static inline int __syncthreads_or(int value, TGH_PLACE) { return tgh_barrier(TGH_VOTE_OR, value != 0, file, line); }
static inline int __syncthreads_count(int value, TGH_PLACE) {
    return tgh_barrier(TGH_VOTE_COUNT, value != 0, file, line);
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, TGH_PLACE) {
    tgh_warp(TGH_SYNCWARP, mask, 0, 0, file, line);
}
static inline unsigned __ballot_sync(unsigned mask, int value, TGH_PLACE) {
    return (unsigned)tgh_warp(TGH_BALLOT, mask, value != 0, 0, file, line);
}
static inline int __any_sync(unsigned mask, int value, TGH_PLACE) {
    return __ballot_sync(mask, value, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int value, TGH_PLACE) {
    return __ballot_sync(mask, value, file, line) == mask;
}

// A lane whose partner lies outside its segment of `width` lanes keeps its own value.
static inline unsigned tgh_lane_index(int source, int width) {
    return (tgh_lane() & ~(unsigned)(width - 1)) | ((unsigned)source & (unsigned)(width - 1));
}
static inline unsigned tgh_lane_up(unsigned delta, int width) {
    unsigned lane = tgh_lane();
    return (lane & (unsigned)(width - 1)) < delta ? lane : lane - delta;
}
static inline unsigned tgh_lane_down(unsigned delta, int width) {
    unsigned lane = tgh_lane();
    return (lane & (unsigned)(width - 1)) + delta >= (unsigned)width ? lane : lane + delta;
}
static inline unsigned tgh_lane_xor(int bits, int width) {
    unsigned lane = tgh_lane(), partner = lane ^ (unsigned)bits;
    return partner >= (lane & ~(unsigned)(width - 1)) + (unsigned)width ? lane : partner;
}
#define TG_SHUFFLE_FORM(T, name, Given, from)                                                       \
    static inline T name(unsigned mask, T value, Given given, int width = 32, TGH_PLACE) {           \
        uint64_t bits = 0;                                                                          \
        __builtin_memcpy(&bits, &value, sizeof value);                                              \
        bits = tgh_warp(TGH_SHUFFLE, mask, bits, from(given, width), file, line);                     \
        __builtin_memcpy(&value, &bits, sizeof value);                                              \
        return value;                                                                               \
    }
#define TG_SHUFFLES(T)                                               \
    TG_SHUFFLE_FORM(T, __shfl_sync, int, tgh_lane_index)              \
    TG_SHUFFLE_FORM(T, __shfl_up_sync, unsigned, tgh_lane_up)         \
    TG_SHUFFLE_FORM(T, __shfl_down_sync, unsigned, tgh_lane_down)     \
    TG_SHUFFLE_FORM(T, __shfl_xor_sync, int, tgh_lane_xor)            \
    static inline unsigned __match_any_sync(unsigned mask, T value, TGH_PLACE) { \
        uint64_t bits = 0;                                           \
        __builtin_memcpy(&bits, &value, sizeof value);               \
        return (unsigned)tgh_warp(TGH_MATCH, mask, bits, 0, file, line); \
    }
TG_SHUFFLES(int)
TG_SHUFFLES(unsigned)
TG_SHUFFLES(long)
TG_SHUFFLES(unsigned long)
TG_SHUFFLES(long long)
TG_SHUFFLES(unsigned long long)
TG_SHUFFLES(float)
TG_SHUFFLES(double)
#undef TG_SHUFFLES
#undef TG_SHUFFLE_FORM

static inline void __threadfence() { tgh_fence(); }
static inline void __threadfence_block() { tgh_fence(); }
static inline void __threadfence_system() { tgh_fence(); }

// A thread is never interrupted inside these, so plain code is atomic; unwatched, since tgh_atomic has told the checks.
#define TGH_UNWATCHED __attribute__((noinline, no_sanitize("thread"), no_sanitize("alignment")))
#define TG_ATOMIC(T, name, result)                                                        \
    TGH_UNWATCHED static T name(T *address, T value, TGH_PLACE) {                           \
        tgh_atomic(address, sizeof(T), file, line);                                        \
        T old = *address;                                                                 \
        *address = result;                                                                \
        return old;                                                                       \
    }
#define TG_ATOMIC_ARITHMETIC(T) TG_ATOMIC(T, atomicAdd, (T)(old + value))
#define TG_ATOMIC_EXCHANGE(T)                                                             \
    TG_ATOMIC(T, atomicExch, value)
#define TG_ATOMIC_ORDER(T)                                                                \
    TG_ATOMIC(T, atomicMax, old > value ? old : value)                                    \
    TG_ATOMIC(T, atomicMin, old < value ? old : value)                                    \
    TG_ATOMIC(T, atomicAnd, (T)(old & value))                                             \
    TG_ATOMIC(T, atomicOr, (T)(old | value))                                              \
    TG_ATOMIC(T, atomicXor, (T)(old ^ value))
#define TG_ATOMIC_CAS(T)                                                                  \
    TGH_UNWATCHED static T atomicCAS(T *address, T expected, T value, TGH_PLACE) {          \
        tgh_atomic(address, sizeof(T), file, line);                                        \
        T old = *address;                                                                 \
        if (old == expected) *address = value;                                            \
        return old;                                                                       \
    }
TG_ATOMIC_ARITHMETIC(int)
TG_ATOMIC_ARITHMETIC(unsigned)
TG_ATOMIC_ARITHMETIC(unsigned long long)
TG_ATOMIC_ARITHMETIC(float)
TG_ATOMIC_ARITHMETIC(double)
TG_ATOMIC(int, atomicSub, (int)((unsigned)old - (unsigned)value))
TG_ATOMIC(unsigned, atomicSub, old - value)
TG_ATOMIC(unsigned, atomicInc, old >= value ? 0 : old + 1)
TG_ATOMIC(unsigned, atomicDec, old == 0 || old > value ? value : old - 1)
TG_ATOMIC_EXCHANGE(int)
TG_ATOMIC_EXCHANGE(unsigned)
TG_ATOMIC_EXCHANGE(unsigned long long)
TG_ATOMIC_EXCHANGE(float)
TG_ATOMIC_ORDER(int)
TG_ATOMIC_ORDER(unsigned)
TG_ATOMIC_ORDER(long long)
TG_ATOMIC_ORDER(unsigned long long)
TG_ATOMIC_CAS(int)
TG_ATOMIC_CAS(unsigned)
TG_ATOMIC_CAS(unsigned short)
TG_ATOMIC_CAS(unsigned long long)
#undef TG_ATOMIC
#undef TG_ATOMIC_ARITHMETIC
#undef TG_ATOMIC_EXCHANGE
#undef TG_ATOMIC_ORDER
#undef TG_ATOMIC_CAS

template <class T> static inline T __ldg(const T *address) { return *address; }
template <class T> static inline T __ldcs(const T *address) { return *address; }
template <class T> static inline T __ldcg(const T *address) { return *address; }
template <class T> static inline void __stcs(T *address, T value) { *address = value; }
template <class T> static inline void __stcg(T *address, T value) { *address = value; }

// The device has these without any header; the host's are in a library that no check looks into.
static inline void *tgh_memcpy(void *to, const void *from, size_t size) {
#ifdef TG_CHECK
    tgh_watch(from, size, 0);
    tgh_watch(to, size, 1);
#endif
    return __builtin_memcpy(to, from, size);
}
static inline void *tgh_memset(void *to, int value, size_t size) {
#ifdef TG_CHECK
    tgh_watch(to, size, 1);
#endif
    return __builtin_memset(to, value, size);
}
#define memcpy tgh_memcpy
#define memset tgh_memset

#define __trap() tgh_trap("__trap was called", __FILE__, __LINE__)
#define assert(condition) ((condition) ? (void)0 : tgh_trap("assertion failed: " #condition, __FILE__, __LINE__))
#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)

// From void** to a typed call, the parameters' types found by the compiler and not by reading the kernel's text.
template <unsigned... i> struct TgIndices {};
template <class T> struct TgKind { static const char value = __is_enum(T) ? 'i' : 's'; };
template <class T> struct TgKind<T *> { static const char value = 'p'; };
#define TG_KIND(T, kind) template <> struct TgKind<T> { static const char value = kind; };
TG_KIND(bool, 'i') TG_KIND(char, 'i') TG_KIND(signed char, 'i') TG_KIND(unsigned char, 'i') TG_KIND(short, 'i')
TG_KIND(unsigned short, 'i') TG_KIND(int, 'i') TG_KIND(unsigned, 'i') TG_KIND(long, 'i') TG_KIND(unsigned long, 'i')
TG_KIND(long long, 'i') TG_KIND(unsigned long long, 'i') TG_KIND(float, 'f') TG_KIND(double, 'f')
#undef TG_KIND

template <class... P> struct TgParameters {
    static constexpr unsigned sizes[sizeof...(P) + 1] = {sizeof(P)..., 0};
    static constexpr char kinds[sizeof...(P) + 1] = {TgKind<P>::value..., 0};
    template <void (*kernel)(P...), unsigned... i>
    TGH_UNWATCHED static void call(void **args, TgIndices<i...>) { kernel(*static_cast<P *>(args[i])...); }
    template <void (*kernel)(P...)>
    TGH_UNWATCHED static void run(void **args) { call<kernel>(args, TgIndices<__integer_pack(sizeof...(P))...>()); }
};
template <class... P> TgParameters<P...> tgh_parameters(void (*)(P...));
#define TGH_KERNEL(name)                                                                                   \
    extern "C" __attribute__((visibility("default"))) const TgKernel tgh_kernel_##name = {                 \
        #name, decltype(tgh_parameters(name))::template run<name>,                                         \
        sizeof(decltype(tgh_parameters(name))::sizes) / sizeof(unsigned) - 1,                              \
        decltype(tgh_parameters(name))::sizes, decltype(tgh_parameters(name))::kinds};
