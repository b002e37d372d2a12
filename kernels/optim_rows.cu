// The updates of optimizers for some rows of tables, in place: nothing else is read or written.
//
// rows[k] is the row that g[k] is the gradient of; -1 is none, others occur once.  A table has `width` columns.  A block's
// 256 threads are 2**lanes_log2 lanes along the width by as many rows as that leaves, as in gather.cu.
#include "optim.cuh"

#ifndef PACK
#define PACK 1
#endif

struct tg_some_rows {
    const T* g;
    const long long* rows;
    long long count, width;
    int lanes_log2;
};

// tables: the variable, then its slots; `step` gets the variable, the gradient, the slots, and gives the new ones.
template <int TABLES, class Step>
TG_INLINE void tg_update_rows(T* const (&tables)[TABLES], const tg_some_rows& some, const Step& step) {
    const int lanes = 1 << some.lanes_log2, lane = threadIdx.x & (lanes - 1), together = 256 >> some.lanes_log2;
    unsigned long long bits = reinterpret_cast<unsigned long long>(some.g);
#pragma unroll
    for (int i = 0; i < TABLES; ++i) bits |= reinterpret_cast<unsigned long long>(tables[i]);
    const bool packed = PACK > 1 && bits % 16 == 0;
    const long long stride = static_cast<long long>(gridDim.x) * together;
    for (long long r = static_cast<long long>(blockIdx.x) * together + (threadIdx.x >> some.lanes_log2);
         r < some.count; r += stride) {
        const long long row = some.rows[r];
        if (row < 0) continue;
        for (long long j = static_cast<long long>(lane) * PACK; j < some.width; j += lanes * PACK) {
            const T* g = some.g + r * some.width + j;
            tg_pack<T, PACK> in[TABLES + 1];
#pragma unroll
            for (int i = 0; i <= TABLES; ++i) {
                const T* from = i == 1 ? g : tables[i ? i - 1 : 0] + row * some.width + j;
                if (packed) {
                    in[i] = tg_load_pack<PACK>(from);
                } else {
#pragma unroll
                    for (int p = 0; p < PACK; ++p) in[i].at[p] = from[p];
                }
            }
            tg_pack<T, PACK> out[TABLES];
#pragma unroll
            for (int p = 0; p < PACK; ++p) {
                tg_w from[TABLES + 1], to[TABLES];
#pragma unroll
                for (int i = 0; i <= TABLES; ++i) from[i] = tg_load(in[i].at[p]);
                step(from, to);
#pragma unroll
                for (int i = 0; i < TABLES; ++i) out[i].at[p] = tg_store<T>(to[i]);
            }
#pragma unroll
            for (int i = 0; i < TABLES; ++i) {
                T* to = tables[i] + row * some.width + j;
                if (packed) {
                    tg_store_pack<PACK>(to, out[i]);
                } else {
#pragma unroll
                    for (int p = 0; p < PACK; ++p) to[p] = out[i].at[p];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    tg_sgd_rows(T* x, const T* g, const long long* rows, tg_number shrink, int decays, tg_number rate, long long count,
                long long width, int lanes_log2) {
    T* const tables[1] = {x};
    tg_update_rows(tables, tg_some_rows{g, rows, count, width, lanes_log2},
                   tg_sgd_step{{tg_value(shrink), decays}, tg_value(rate)});
}

extern "C" __global__ void __launch_bounds__(256)
    tg_momentum_rows(T* x, T* velocity, const T* g, const long long* rows, tg_number shrink, int decays, tg_number rate,
                     tg_number momentum, int nesterov, long long count, long long width, int lanes_log2) {
    T* const tables[2] = {x, velocity};
    tg_update_rows(tables, tg_some_rows{g, rows, count, width, lanes_log2},
                   tg_momentum_step{{tg_value(shrink), decays}, tg_value(rate), tg_value(momentum), nesterov});
}

extern "C" __global__ void __launch_bounds__(256)
    tg_adagrad_rows(T* x, T* sum, const T* g, const long long* rows, tg_number shrink, int decays, tg_number rate,
                    tg_number epsilon, long long count, long long width, int lanes_log2) {
    T* const tables[2] = {x, sum};
    tg_update_rows(tables, tg_some_rows{g, rows, count, width, lanes_log2},
                   tg_adagrad_step{{tg_value(shrink), decays}, tg_value(rate), tg_value(epsilon)});
}

extern "C" __global__ void __launch_bounds__(256, 3)
    tg_adam_rows(T* x, T* m, T* v, const T* g, const long long* rows, tg_number shrink, int decays, tg_number factor,
                 tg_number keep_m, tg_number add_m, tg_number keep_v, tg_number add_v, tg_number epsilon,
                 long long count, long long width, int lanes_log2) {
    T* const tables[3] = {x, m, v};
    tg_update_rows(tables, tg_some_rows{g, rows, count, width, lanes_log2},
                   tg_adam_step{{tg_value(shrink), decays}, tg_value(factor), tg_value(keep_m), tg_value(add_m),
                                tg_value(keep_v), tg_value(add_v), tg_value(epsilon)});
}
