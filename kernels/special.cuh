// Special functions that CUDA's library has not, and those of SciPy's that agree with it in all but corner cases.
#pragma once

// x * log(y), 0 where x is 0 and y is a number.
template <typename T>
TG_INLINE T tg_xlogy(T x, T y) {
    return x == T(0) && y == y ? T(0) : x * log(y);
}
template <typename T>
TG_INLINE T tg_xlog1py(T x, T y) {
    return x == T(0) && y == y ? T(0) : x * log1p(y);
}
template <typename T>
TG_INLINE T tg_entr(T x) {
    return x > T(0) ? -x * log(x) : x == T(0) ? T(0) : x == x ? -static_cast<T>(INFINITY) : x;
}

// log(x / (1 - x)); near one half by log1p, as the quotient is near 1.
template <typename T>
TG_INLINE T tg_logit(T x) {
    if (!(x > T(0.25) && x < T(0.75))) return log(x / (T(1) - x));
    const T d = x + x - T(1);
    return log1p(d) - log1p(-d);
}

// The digamma function: reflected for negative numbers, raised by its recurrence to where the asymptotic series holds.
template <typename T>
TG_INLINE T tg_digamma(T x) {
    if (x == T(0)) return copysign(static_cast<T>(INFINITY), -x);
    if (x == -static_cast<T>(INFINITY)) return static_cast<T>(NAN);
    T total = T(0);
    if (x < T(0)) {
        const T part = x - floor(x);
        if (part == T(0)) return static_cast<T>(NAN);
        total = T(-3.14159265358979323846) / tan(T(3.14159265358979323846) * part);
        x = T(1) - x;
    }
    for (; x < T(10); x += T(1)) total -= T(1) / x;
    const T z = T(1) / (x * x);  // Bernoulli numbers over twice their order
    const T tail = z * (T(8.3333333333333333e-2) - z * (T(8.3333333333333333e-3) - z * (T(3.968253968253968e-3)
        - z * (T(4.1666666666666667e-3) - z * (T(7.5757575757575758e-3) - z * (T(2.1092796092796093e-2)
        - z * T(8.3333333333333333e-2)))))));
    return total + (log(x) - T(0.5) / x - tail);
}

// Under names that no variable of emitted code has.
template <typename T>
TG_INLINE T tg_bessel_j0(T x) {
    return j0(x);
}
template <typename T>
TG_INLINE T tg_bessel_j1(T x) {
    return j1(x);
}
template <typename T>
TG_INLINE T tg_bessel_y0(T x) {
    return y0(x);
}
template <typename T>
TG_INLINE T tg_bessel_y1(T x) {
    return y1(x);
}
