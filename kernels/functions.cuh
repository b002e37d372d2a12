// Functions of scalars in emitted code, each as the NumPy ufunc of that meaning, for every compute type.
//
// Integers wrap (signed overflow is undefined in C++, so they are computed unsigned); NaN propagates; division of
// integers by zero gives 0.  Functions that C++ has for float and double (exp, sin, ...) keep their names.
#pragma once

// ---- what a type is

enum tg_kind_of { tg_is_bool, tg_is_int, tg_is_real, tg_is_complex };

template <typename T>
struct tg_traits {
    static constexpr tg_kind_of kind = tg_is_int;
};
template <>
struct tg_traits<bool> {
    static constexpr tg_kind_of kind = tg_is_bool;
};
template <>
struct tg_traits<float> {
    static constexpr tg_kind_of kind = tg_is_real;
};
template <>
struct tg_traits<double> {
    static constexpr tg_kind_of kind = tg_is_real;
};
template <typename R>
struct tg_traits<tg_complex<R>> {
    static constexpr tg_kind_of kind = tg_is_complex;
};

// An unsigned type that an integer computes in without overflow being undefined, nor promoted to a signed one.
template <int BYTES>
struct tg_natural_of {
    typedef unsigned int type;
};
template <>
struct tg_natural_of<8> {
    typedef unsigned long long type;
};
template <typename T>
using tg_natural = typename tg_natural_of<sizeof(T)>::type;

template <typename T>
__device__ constexpr bool tg_is_signed() {
    return T(-1) < T(0);
}

// Whether a number is below 0, which compilers warn of where no value of the type can be.
template <typename T>
TG_INLINE bool tg_below_zero(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_bool || !tg_is_signed<T>()) {
        return false;
    } else {
        return x < T(0);
    }
}

// The least and the greatest value of an integer type; of floats the infinities.
template <typename T>
TG_INLINE T tg_lowest() {
    if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return false;
    } else if constexpr (tg_traits<T>::kind == tg_is_int) {
        return tg_is_signed<T>() ? static_cast<T>(tg_natural<T>(1) << (8 * sizeof(T) - 1)) : T(0);
    } else if constexpr (tg_traits<T>::kind == tg_is_complex) {
        typedef typename T::part R;
        return T(tg_lowest<R>(), tg_lowest<R>());
    } else {
        return -static_cast<T>(INFINITY);
    }
}
template <typename T>
TG_INLINE T tg_highest() {
    if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return true;
    } else if constexpr (tg_traits<T>::kind == tg_is_int) {
        return static_cast<T>(~tg_natural<T>(tg_lowest<T>()));
    } else if constexpr (tg_traits<T>::kind == tg_is_complex) {
        typedef typename T::part R;
        return T(tg_highest<R>(), tg_highest<R>());
    } else {
        return static_cast<T>(INFINITY);
    }
}

// ---- tests

template <typename T>
TG_INLINE bool tg_isnan(T x) {
    return x != x;
}
template <typename R>
TG_INLINE bool tg_isnan(tg_complex<R> x) {
    return x.re != x.re || x.im != x.im;
}
template <typename T>
TG_INLINE bool tg_isfinite(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return fabs(x) < static_cast<T>(INFINITY);
    } else {
        return true;
    }
}
template <typename R>
TG_INLINE bool tg_isfinite(tg_complex<R> x) {
    return tg_isfinite(x.re) && tg_isfinite(x.im);
}
template <typename T>
TG_INLINE bool tg_isinf(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return fabs(x) == static_cast<T>(INFINITY);
    } else {
        return false;
    }
}
template <typename R>
TG_INLINE bool tg_isinf(tg_complex<R> x) {
    return tg_isinf(x.re) || tg_isinf(x.im);
}
template <typename T>
TG_INLINE bool tg_signbit(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return copysign(T(1), x) < T(0);
    } else {
        return tg_below_zero(x);  // NumPy asks the nearest float
    }
}

// ---- arithmetic

template <typename T>
TG_INLINE T tg_plus(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_int) {
        return static_cast<T>(tg_natural<T>(x) + tg_natural<T>(y));
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x || y;
    } else {
        return x + y;
    }
}
template <typename T>
TG_INLINE T tg_minus(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_int) {
        return static_cast<T>(tg_natural<T>(x) - tg_natural<T>(y));
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x != y;
    } else {
        return x - y;
    }
}
template <typename T>
TG_INLINE T tg_times(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_int) {
        return static_cast<T>(tg_natural<T>(x) * tg_natural<T>(y));
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x && y;
    } else {
        return x * y;
    }
}
template <typename T>
TG_INLINE T tg_negate(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_int) {
        return static_cast<T>(tg_natural<T>(0) - tg_natural<T>(x));
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x;
    } else {
        return -x;
    }
}

template <typename T>
TG_INLINE T tg_sign(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x;
    } else {
        return x > T(0) ? T(1) : tg_below_zero(x) ? T(-1) : x == T(0) ? T(0) : x;
    }
}
template <typename R>
TG_INLINE tg_complex<R> tg_sign(tg_complex<R> x) {
    const R size = hypot(x.re, x.im), nan = static_cast<R>(NAN);
    if (size == R(0)) return tg_complex<R>(R(0), R(0));
    if (tg_isnan(size) || (tg_isinf(x.re) && tg_isinf(x.im))) return tg_complex<R>(nan, nan);
    if (tg_isinf(x.re)) return tg_complex<R>(tg_sign(x.re), R(0));
    if (tg_isinf(x.im)) return tg_complex<R>(R(0), tg_sign(x.im));
    return tg_complex<R>(x.re / size, x.im / size);
}

template <typename T>
TG_INLINE T tg_abs(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return fabs(x);
    } else if constexpr (tg_traits<T>::kind == tg_is_int) {
        return tg_below_zero(x) ? tg_negate(x) : x;
    } else {
        return x;
    }
}
template <typename R>
TG_INLINE R tg_abs(tg_complex<R> x) {
    return hypot(x.re, x.im);
}

template <typename T>
TG_INLINE T tg_max(T x, T y) {
    return x >= y || tg_isnan(x) ? x : y;  // not ordered: then y is NaN, or x is
}
template <typename T>
TG_INLINE T tg_min(T x, T y) {
    return x <= y || tg_isnan(x) ? x : y;
}

// The remainder first, as floor(x / y) may be one too many by rounding.
template <typename T>
TG_INLINE T tg_remainder(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        const T left = fmod(x, y);
        if (y == T(0)) return left;
        if (left == T(0)) return copysign(T(0), y);
        return (y < T(0)) != (left < T(0)) ? left + y : left;
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return false;
    } else {
        if (y == T(0) || (tg_is_signed<T>() && y == T(-1))) return T(0);
        const T left = static_cast<T>(x % y);
        return left != T(0) && tg_below_zero(left) != tg_below_zero(y) ? static_cast<T>(left + y) : left;
    }
}
template <typename T>
TG_INLINE T tg_floordiv(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        if (y == T(0)) return x / y;
        const T left = fmod(x, y);
        T quotient = (x - left) / y;  // an integer but for rounding
        if (left != T(0) && (y < T(0)) != (left < T(0))) quotient -= T(1);
        if (quotient == T(0)) return copysign(T(0), x / y);
        const T below = floor(quotient);
        return quotient - below > T(0.5) ? below + T(1) : below;
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x && y;
    } else {
        if (y == T(0)) return T(0);
        if (tg_is_signed<T>() && y == T(-1)) return tg_negate(x);
        const T quotient = static_cast<T>(x / y);
        return x % y != T(0) && tg_below_zero(x) != tg_below_zero(y) ? static_cast<T>(quotient - 1) : quotient;
    }
}

template <typename T>
TG_INLINE T tg_power_of_int(T base, unsigned long long n) {
    T result = T(1);
    for (; n; n >>= 1) {
        if (n & 1) result = tg_times(result, base);
        base = tg_times(base, base);
    }
    return result;
}
template <typename T>
TG_INLINE T tg_pow(T x, T y) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return pow(x, y);
    } else if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return x || !y;
    } else {
        if (!tg_below_zero(y)) return tg_power_of_int(x, static_cast<unsigned long long>(y));
        // Negative exponents are an error in NumPy; here they give the power truncated.
        return x == T(1) ? x : x == T(-1) ? ((y & 1) ? x : T(1)) : T(0);
    }
}
template <typename R>
TG_INLINE tg_complex<R> tg_pow(tg_complex<R> x, tg_complex<R> y) {
    if (y.re == R(0) && y.im == R(0)) return tg_complex<R>(R(1));
    if (x.re == R(0) && x.im == R(0)) {
        const R nan = static_cast<R>(NAN);
        return y.re > R(0) ? tg_complex<R>(R(0)) : tg_complex<R>(nan, nan);
    }
    const R n = floor(y.re);
    if (y.im == R(0) && n == y.re && fabs(n) < R(100)) {  // exact for small integers, as in NumPy
        const tg_complex<R> size = tg_power_of_int(x, static_cast<unsigned long long>(fabs(n)));
        return n < R(0) ? tg_complex<R>(R(1)) / size : size;
    }
    return exp(y * log(x));
}

// ---- exponentials

template <typename T>
TG_INLINE T tg_logaddexp(T x, T y) {
    if (x == y) return x + T(0.6931471805599453);  // also both infinite
    const T d = x - y;
    return d > T(0) ? x + log1p(exp(-d)) : d <= T(0) ? y + log1p(exp(d)) : d;
}
template <typename T>
TG_INLINE T tg_sigmoid(T x) {
    return T(1) / (exp(-x) + T(1));
}
TG_INLINE float tg_sigmoid(float x) { return x < -87.0f ? exp(x) : 1.0f / (exp(-x) + 1.0f); }
TG_INLINE double tg_sigmoid(double x) { return x < -708.0 ? exp(x) : 1.0 / (exp(-x) + 1.0); }
// x times its sigmoid; where that is 0, x may be minus infinity.
template <typename T>
TG_INLINE T tg_silu(T x) {
    return x < T(-800) ? T(-0.0) : x * tg_sigmoid(x);
}
template <typename T>
TG_INLINE T tg_gelu_tanh(T x) {
    return x < T(-800) ? T(-0.0)
                       : x * tg_sigmoid(x * (T(1.5957691216057308) + T(0.07135481627260025) * tg_times(x, x)));
}
template <typename T>
TG_INLINE T tg_sigmoid_slope(T x) {
    const T power = exp(-tg_abs(x));
    return power / tg_times(power + T(1), power + T(1));
}
template <typename T>
TG_INLINE T tg_mish(T x) {
    const T power = exp(tg_min(x, T(sizeof(T) == sizeof(float) ? 20.0f : 40.0f)));
    const T n = power * (power + T(2));
    return x < T(-800) ? T(-0.0) : x * (n / (n + T(2)));
}
template <typename T>
TG_INLINE T tg_softsign(T x) {
    const T near = tg_max(tg_min(x, T(1e30)), T(-1e30));
    return near / (tg_abs(near) + T(1));
}
// ---- the normal distribution

// 2**x and 1/x by the instruction for it: an error of up to 2**-22 of the result.
TG_INLINE float tg_quick_exp2(float x) {
#ifdef TG_HOST
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
TG_INLINE float tg_quick_reciprocal(float x) {
#ifdef TG_HOST
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// |x|, but not above 40, where the tail is 0 in every dtype.
template <typename T>
TG_INLINE T tg_tail_point(T x) {
    return tg_abs(x) > T(40) ? T(40) : tg_abs(x);
}
// Phi(-a) for a from 0 to 40, and Phi(-a) - a phi(a), with Phi the distribution and phi its density.
template <typename T>
struct tg_normal_tail {
    T value, slope;
    TG_INLINE explicit tg_normal_tail(T a) : value(normcdf(-a)) {
        slope = value - a * (exp(T(-0.5) * a * a) * T(0.3989422804014327));
    }
};
// In float by exp(-a * a / 2) times a rational approximation, as on the CPU (ops/elementwise/_erf.py).  The rounding
// errors of the exponent, which the exponential would magnify, are put in afterwards.  The result is within 4 units in
// the last place and takes half the instructions of normcdf.
template <>
struct tg_normal_tail<float> {
    float value, slope;
    TG_INLINE explicit tg_normal_tail(float a) {
        float above = fmaf(4.1213083e-3f, a, 4.0666891e-2f), below = fmaf(1.03304695e-2f, a, 0.101943177f);
        above = fmaf(fmaf(fmaf(above, a, 0.183334967f), a, 0.43842965f), a, 0.5f);
        below = fmaf(fmaf(fmaf(fmaf(below, a, 0.46973418f), a, 1.20291772f), a, 1.67474428f), a, 1.0f);
        const float inverse = tg_quick_reciprocal(below), near = above * inverse;
        const float ratio = fmaf(fmaf(-below, near, above), inverse, near);
        const float square = a * a, power = square * -0.72134752f;  // -log2(e) / 2, of which -9.63e-9 is missing
        float lost = fmaf(square, -9.63e-9f, fmaf(square, -0.72134752f, -power));
        lost = fmaf(fmaf(a, a, -square), -0.72134752f, lost);
        const float rough = tg_quick_exp2(power), bell = fmaf(rough * 0.69314718f, lost, rough);
        value = ratio * bell;
        slope = fmaf(-a, 0.39894228f, ratio) * bell;
    }
};

// gelu(x) = max(x, 0) - a Phi(-a) for a = |x|: nothing cancels in the tail.
template <typename T>
TG_INLINE T tg_gelu(T x) {
    const T a = tg_tail_point(x);
    return fma(-a, tg_normal_tail<T>(a).value, x < T(0) ? T(0) : x);
}
template <typename T>
TG_INLINE T tg_gelu_slope(T x) {
    const T slope = tg_normal_tail<T>(tg_tail_point(x)).slope;
    return x < T(0) ? slope : T(1) - slope;
}
template <typename T>
TG_INLINE T tg_softplus(T x) {
    // Above the cut x itself is the answer, and below it exp(x) does not overflow.
    const T cut = T(sizeof(T) == sizeof(float) ? 20.0f : 40.0f);
    return tg_max(log1p(exp(tg_min(x, cut))), x);
}
template <typename R>
TG_INLINE tg_complex<R> tg_softplus(tg_complex<R> x) {
    return tg_max(log1p(exp(tg_min(x, tg_complex<R>(R(sizeof(R) == 4 ? 20 : 40))))), x);
}

// ---- rounding; integers are whole already

template <typename T>
TG_INLINE T tg_floor(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return floor(x);
    } else {
        return x;
    }
}
template <typename T>
TG_INLINE T tg_ceil(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return ceil(x);
    } else {
        return x;
    }
}
template <typename T>
TG_INLINE T tg_trunc(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return trunc(x);
    } else {
        return x;
    }
}
template <typename T>
TG_INLINE T tg_round(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_real) {
        return rint(x);
    } else {
        return x;
    }
}
template <typename R>
TG_INLINE tg_complex<R> tg_round(tg_complex<R> x) {
    return tg_complex<R>(rint(x.re), rint(x.im));
}

// ---- bits

template <typename T>
TG_INLINE T tg_invert(T x) {
    if constexpr (tg_traits<T>::kind == tg_is_bool) {
        return !x;
    } else {
        return static_cast<T>(~x);
    }
}
// A negative count is as one too large.
template <typename T>
TG_INLINE T tg_shl(T x, T count) {
    if (static_cast<unsigned long long>(count) >= 8 * sizeof(T)) return T(0);
    return static_cast<T>(tg_natural<T>(x) << static_cast<int>(count));
}
template <typename T>
TG_INLINE T tg_shr(T x, T count) {
    if (static_cast<unsigned long long>(count) >= 8 * sizeof(T)) return tg_below_zero(x) ? T(-1) : T(0);
    return static_cast<T>(x >> static_cast<int>(count));
}

#include "special.cuh"
