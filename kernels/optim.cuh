// The formulas of optimizers' updates that whole tensors (optim.cu) and rows of tables (optim_rows.cu) have in common.
//
// Every operation is rounded to T as soon as it is made, in the order in which the formulas are written: the results
// have the bits that the same formulas have when each operation is an array operation of its own.
//
// T: the dtype of all arrays; W, its compute type, is that of the numbers, which must already be rounded to T.
#pragma once
#include "scalar.cuh"

#ifndef T
#define T tg_float32
#endif

typedef tg_wide<T>::type tg_w;

// The numbers of a launch by value, or with TG_LIVE each as an array of one element: those of a captured step change.
#ifdef TG_LIVE
typedef const T* tg_number;
TG_INLINE tg_w tg_value(tg_number x) { return tg_load(*x); }
#else
typedef tg_w tg_number;
TG_INLINE tg_w tg_value(tg_number x) { return x; }
#endif

// A number as an array of T would hold it.
TG_INLINE tg_w tg_r(tg_w x) { return tg_round_to<T>(x); }

// Decoupled weight decay; no product at all without it, so that what is not finite stays as it is.
struct tg_decay {
    tg_w shrink;
    int decays;
    TG_INLINE tg_w operator()(tg_w x) const { return decays ? tg_r(x * shrink) : x; }
};

struct tg_adam_step {
    tg_decay decay;
    tg_w factor, keep_m, add_m, keep_v, add_v, epsilon;
    TG_INLINE void operator()(const tg_w (&in)[4], tg_w (&out)[3]) const {
        const tg_w x = decay(in[0]), g = in[1];
        const tg_w m = tg_r(tg_r(keep_m * in[2]) + tg_r(add_m * g));
        const tg_w v = tg_r(tg_r(keep_v * in[3]) + tg_r(add_v * tg_r(g * g)));
        const tg_w down = tg_r(tg_r(factor * m) / tg_r(tg_r(sqrt(v)) + epsilon));
        out[0] = x - down;
        out[1] = m;
        out[2] = v;
    }
};

struct tg_sgd_step {
    tg_decay decay;
    tg_w rate;
    TG_INLINE void operator()(const tg_w (&in)[2], tg_w (&out)[1]) const {
        out[0] = decay(in[0]) - tg_r(rate * in[1]);
    }
};

struct tg_momentum_step {
    tg_decay decay;
    tg_w rate, momentum;
    int nesterov;
    TG_INLINE void operator()(const tg_w (&in)[3], tg_w (&out)[2]) const {
        const tg_w x = decay(in[0]), down = tg_r(rate * in[1]);
        const tg_w velocity = tg_r(tg_r(momentum * in[2]) - down);
        out[0] = nesterov ? tg_r(x + tg_r(momentum * velocity)) - down : x + velocity;
        out[1] = velocity;
    }
};

struct tg_adagrad_step {
    tg_decay decay;
    tg_w rate, epsilon;
    TG_INLINE void operator()(const tg_w (&in)[3], tg_w (&out)[2]) const {
        const tg_w g = in[1], sum = tg_r(in[2] + tg_r(g * g));
        out[0] = decay(in[0]) - tg_r(tg_r(rate * g) / tg_r(sqrt(tg_r(sum + epsilon))));
        out[1] = sum;
    }
};
