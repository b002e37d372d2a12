// The updates of optimizers, for many tensors in one launch.
//
// A launch takes a table by value: for each tensor its arrays' addresses and where its chunks begin among the blocks,
// so nothing is uploaded.  One block makes one chunk of TG_CHUNK elements of one tensor; chunks begin at multiples of
// 16 bytes within an array, so aligned arrays are moved by 16 bytes at a time, and others element by element.
//
// GRADIENT: the dtype of the gradients, if it is not T.  VALUE: that of the variables, if they are of a half dtype and
// x is their master of T, which has the digits beyond (tapegrad/optim/optimizers/masters.py): then behind the arrays
// that are read comes the variable, and behind those that are written its new value.
#include "optim.cuh"

#ifndef GRADIENT
#define GRADIENT T
#endif
#ifdef VALUE
constexpr int TG_VALUES = 1;
#else
#define VALUE T
constexpr int TG_VALUES = 0;
#endif
#ifndef TG_MANY
#define TG_MANY 48
#endif
#ifndef TG_CHUNK
#define TG_CHUNK 8192
#endif

template <int ARRAYS>
struct tg_table {
    void* at[TG_MANY][ARRAYS + 2 * TG_VALUES];
    long long size[TG_MANY];
    int first[TG_MANY];  // block; none is without elements
    int count;
};
// Kernels may be given 4096 bytes on every device.
static_assert(sizeof(tg_table<7>) <= 4096 - 80, "the table is too large for a kernel's parameters");
static_assert(sizeof(tg_table<9>) <= 4096 - 56, "the table is too large for a kernel's parameters");

// The arrays of a chunk.
template <int READS, int WRITES>
struct tg_chunk {
    void* const* at;
    long long begin;

    template <typename U>
    TG_INLINE U* array(int i) const {
        return static_cast<U*>(at[i]) + begin;
    }
    TG_INLINE bool aligned() const {
        unsigned long long bits = 0;
#pragma unroll
        for (int i = 0; i < READS + WRITES + 2 * TG_VALUES; ++i) bits |= reinterpret_cast<unsigned long long>(at[i]);
        return bits % 16 == 0;
    }
    // Give `step` the N elements at j.
    template <int N, class Step>
    TG_INLINE void update(int j, const Step& step) const {
        tg_pack<T, N> in[READS], out[WRITES];
        tg_pack<VALUE, N> value;
        const tg_pack<GRADIENT, N> g = tg_load_pack<N>(array<GRADIENT>(1) + j);
#pragma unroll
        for (int i = 0; i < READS; ++i) {
            if (i != 1) in[i] = tg_load_pack<N>(array<T>(i) + j);
        }
        if constexpr (TG_VALUES) value = tg_load_pack<N>(array<VALUE>(READS) + j);
#pragma unroll
        for (int p = 0; p < N; ++p) {
            tg_w from[READS], to[WRITES];
#pragma unroll
            for (int i = 0; i < READS; ++i) from[i] = i == 1 ? tg_w(tg_load(g.at[p])) : tg_load(in[i].at[p]);
            if constexpr (TG_VALUES) {  // the master counts where it is the variable's value, but for rounding
                const tg_w now = tg_load(value.at[p]);
                from[0] = tg_load(tg_store<VALUE>(from[0])) == now ? from[0] : now;
            }
            step(from, to);
#pragma unroll
            for (int i = 0; i < WRITES; ++i) out[i].at[p] = tg_store<T>(to[i]);
            if constexpr (TG_VALUES) value.at[p] = tg_store<VALUE>(tg_load(out[0].at[p]));
        }
#pragma unroll
        for (int i = 0; i < WRITES; ++i) tg_store_pack<N>(array<T>(READS + TG_VALUES + i) + j, out[i]);
        if constexpr (TG_VALUES) tg_store_pack<N>(array<VALUE>(READS + TG_VALUES + WRITES) + j, value);
    }
};

// Give `step` every element of this block's chunk: READS arrays' values in, the others' out.
template <int READS, int ARRAYS, class Step>
TG_INLINE void tg_update(const tg_table<ARRAYS>& table, const Step& step) {
    constexpr int PACK = 16 / sizeof(T);
    static_assert(TG_CHUNK % PACK == 0, "a chunk must begin at a multiple of 16 bytes");
    const int block = static_cast<int>(blockIdx.x);
    int which = 0, beyond = table.count;
    while (beyond - which > 1) {  // the last tensor that begins at this block or before
        const int middle = (which + beyond) / 2;
        if (table.first[middle] <= block)
            which = middle;
        else
            beyond = middle;
    }
    const long long begin = static_cast<long long>(block - table.first[which]) * TG_CHUNK;
    const long long left = table.size[which] - begin;
    const int n = left < TG_CHUNK ? static_cast<int>(left) : TG_CHUNK;
    const tg_chunk<READS, ARRAYS - READS> chunk{table.at[which], begin};
    int done = 0;
    if (chunk.aligned()) {
        done = n / PACK * PACK;
        for (int j = static_cast<int>(threadIdx.x) * PACK; j < done; j += static_cast<int>(blockDim.x) * PACK) {
            chunk.template update<PACK>(j, step);
        }
    }
#pragma unroll 1
    for (int j = done + static_cast<int>(threadIdx.x); j < n; j += static_cast<int>(blockDim.x)) {
        chunk.template update<1>(j, step);
    }
}

// The slots that are kept besides the mean square: the mean gradient, and the velocity.
template <bool CENTERED, bool MOMENTUM>
struct tg_rmsprop_step {
    tg_decay decay;
    tg_w rate, keep, add, epsilon, momentum;
    TG_INLINE void operator()(const tg_w (&in)[3 + CENTERED + MOMENTUM], tg_w (&out)[2 + CENTERED + MOMENTUM]) const {
        const tg_w g = in[1];
        const tg_w square = tg_r(tg_r(keep * in[2]) + tg_r(add * tg_r(g * g)));
        tg_w variance = square;
        if (CENTERED) {
            const tg_w mean = tg_r(tg_r(keep * in[3]) + tg_r(add * g));
            variance = tg_r(square - tg_r(mean * mean));
            variance = variance < 0 ? tg_w(0) : variance;  // rounding may have made it negative; NaN stays
            out[2] = mean;
        }
        tg_w down = tg_r(tg_r(rate * g) / tg_r(sqrt(tg_r(variance + epsilon))));
        if (MOMENTUM) {
            down = tg_r(tg_r(momentum * in[2 + CENTERED + MOMENTUM]) + down);
            out[1 + CENTERED + MOMENTUM] = down;
        }
        out[0] = decay(in[0]) - down;
        out[1] = square;
    }
};

struct tg_lion_step {
    tg_decay decay;
    tg_w rate, keep_1, add_1, keep_2, add_2;
    TG_INLINE void operator()(const tg_w (&in)[3], tg_w (&out)[2]) const {
        const tg_w g = in[1], m = in[2];
        const tg_w mixed = tg_r(tg_r(keep_1 * m) + tg_r(add_1 * g));
        const tg_w sign = mixed > 0 ? tg_w(1) : mixed < 0 ? tg_w(-1) : mixed == 0 ? tg_w(0) : mixed;
        out[0] = decay(in[0]) - tg_r(rate * sign);
        out[1] = tg_r(keep_2 * m) + tg_r(add_2 * g);
    }
};

// The direction of a step; how far it goes depends on norms, which need all of it.
struct tg_lamb_step {
    tg_w scale_m, scale_v, keep_m, add_m, keep_v, add_v, epsilon, part;
    TG_INLINE void operator()(const tg_w (&in)[4], tg_w (&out)[3]) const {
        const tg_w g = in[1];
        const tg_w m = tg_r(tg_r(keep_m * in[2]) + tg_r(add_m * g));
        const tg_w v = tg_r(tg_r(keep_v * in[3]) + tg_r(add_v * tg_r(g * g)));
        const tg_w adam = tg_r(tg_r(scale_m * m) / tg_r(tg_r(sqrt(tg_r(scale_v * v))) + epsilon));
        out[0] = adam + tg_r(part * in[0]);
        out[1] = m;
        out[2] = v;
    }
};

// Arrays: x, g, m, v, then the new x, m, v.  Three blocks at once: told nothing, NVRTC 12.0 spills
// in float64; told four, every NVRTC spills in bfloat16.
extern "C" __global__ void __launch_bounds__(256, 3)
    tg_adam(const tg_table<7> table, tg_number shrink, int decays, tg_number factor, tg_number keep_m,
            tg_number add_m, tg_number keep_v, tg_number add_v, tg_number epsilon) {
    tg_update<4>(table, tg_adam_step{{tg_value(shrink), decays}, tg_value(factor), tg_value(keep_m), tg_value(add_m),
                                     tg_value(keep_v), tg_value(add_v), tg_value(epsilon)});
}

// Arrays: x, g, then the new x.
extern "C" __global__ void __launch_bounds__(256)
    tg_sgd(const tg_table<3> table, tg_number shrink, int decays, tg_number rate) {
    tg_update<2>(table, tg_sgd_step{{tg_value(shrink), decays}, tg_value(rate)});
}

// Arrays: x, g, velocity, then the new x and velocity.
extern "C" __global__ void __launch_bounds__(256)
    tg_momentum(const tg_table<5> table, tg_number shrink, int decays, tg_number rate, tg_number momentum,
                int nesterov) {
    tg_update<3>(table, tg_momentum_step{{tg_value(shrink), decays}, tg_value(rate), tg_value(momentum), nesterov});
}

#define TG_RMSPROP(NAME, CENTERED, MOMENTUM)                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(const tg_table<5 + 2 * (CENTERED + MOMENTUM)> table, tg_number shrink, int decays, tg_number rate,        \
             tg_number keep, tg_number add, tg_number epsilon, tg_number momentum) {                                   \
        tg_update<3 + CENTERED + MOMENTUM>(                                                                            \
            table, tg_rmsprop_step<CENTERED, MOMENTUM>{{tg_value(shrink), decays}, tg_value(rate), tg_value(keep),     \
                                                       tg_value(add), tg_value(epsilon), tg_value(momentum)});         \
    }
// Arrays: x, g, mean square, [mean gradient], [velocity], then the new ones but g.
TG_RMSPROP(tg_rmsprop, 0, 0)
TG_RMSPROP(tg_rmsprop_centered, 1, 0)
TG_RMSPROP(tg_rmsprop_momentum, 0, 1)
TG_RMSPROP(tg_rmsprop_centered_momentum, 1, 1)

// Arrays: x, g, sum of squares, then the new x and sum.  Three blocks at once as above: NVRTC 12.1 would spill.
extern "C" __global__ void __launch_bounds__(256, 3)
    tg_adagrad(const tg_table<5> table, tg_number shrink, int decays, tg_number rate, tg_number epsilon) {
    tg_update<3>(table, tg_adagrad_step{{tg_value(shrink), decays}, tg_value(rate), tg_value(epsilon)});
}

// Arrays: x, g, m, then the new x and m.
extern "C" __global__ void __launch_bounds__(256)
    tg_lion(const tg_table<5> table, tg_number shrink, int decays, tg_number rate, tg_number keep_1, tg_number add_1,
            tg_number keep_2, tg_number add_2) {
    tg_update<3>(table, tg_lion_step{{tg_value(shrink), decays}, tg_value(rate), tg_value(keep_1), tg_value(add_1),
                                     tg_value(keep_2), tg_value(add_2)});
}

// Arrays: x, g, m, v, then the direction and the new m, v.  Nothing shrinks.
extern "C" __global__ void __launch_bounds__(256, 3)
    tg_lamb(const tg_table<7> table, tg_number, int, tg_number scale_m, tg_number scale_v, tg_number keep_m,
            tg_number add_m, tg_number keep_v, tg_number add_v, tg_number epsilon, tg_number part) {
    tg_update<4>(table, tg_lamb_step{tg_value(scale_m), tg_value(scale_v), tg_value(keep_m), tg_value(add_m),
                                     tg_value(keep_v), tg_value(add_v), tg_value(epsilon), tg_value(part)});
}
