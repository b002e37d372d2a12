// Complex numbers with NumPy's semantics: order is lexicographic, division is Smith's, functions take principal values.
//
// Functions of complex numbers have the names that the real ones have (exp, sqrt, ...), so that emitted code is the same
// text for both.  R is float or double.
#pragma once

#define TG_INLINE __device__ __forceinline__

template <typename R>
struct tg_complex {
    typedef R part;
    R re, im;

    tg_complex() = default;
    TG_INLINE tg_complex(R re_) : re(re_), im(R(0)) {}
    TG_INLINE tg_complex(R re_, R im_) : re(re_), im(im_) {}
    template <typename S>
    TG_INLINE tg_complex(const tg_complex<S>& z) : re(static_cast<R>(z.re)), im(static_cast<R>(z.im)) {}
};

template <typename R>
TG_INLINE R tg_real(tg_complex<R> z) {
    return z.re;
}
template <typename R>
TG_INLINE R tg_imag(tg_complex<R> z) {
    return z.im;
}
template <typename R>
TG_INLINE tg_complex<R> tg_conj(tg_complex<R> z) {
    return tg_complex<R>(z.re, -z.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator-(tg_complex<R> z) {
    return tg_complex<R>(-z.re, -z.im);
}

// ---- arithmetic; a real operand is not widened first, which keeps signs of zeros and saves half the work

template <typename R>
TG_INLINE tg_complex<R> operator+(tg_complex<R> a, tg_complex<R> b) {
    return tg_complex<R>(a.re + b.re, a.im + b.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator-(tg_complex<R> a, tg_complex<R> b) {
    return tg_complex<R>(a.re - b.re, a.im - b.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator*(tg_complex<R> a, tg_complex<R> b) {
    return tg_complex<R>(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re);
}
template <typename R>
TG_INLINE tg_complex<R> operator/(tg_complex<R> a, tg_complex<R> b) {
    const R re = fabs(b.re), im = fabs(b.im);
    if (re >= im) {
        if (re == R(0)) return tg_complex<R>(a.re / re, a.im / re);
        const R ratio = b.im / b.re, scale = R(1) / (b.re + b.im * ratio);
        return tg_complex<R>((a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale);
    }
    const R ratio = b.re / b.im, scale = R(1) / (b.im + b.re * ratio);
    return tg_complex<R>((a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale);
}

template <typename R>
TG_INLINE tg_complex<R> operator+(tg_complex<R> a, R b) {
    return tg_complex<R>(a.re + b, a.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator+(R a, tg_complex<R> b) {
    return tg_complex<R>(a + b.re, b.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator-(tg_complex<R> a, R b) {
    return tg_complex<R>(a.re - b, a.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator-(R a, tg_complex<R> b) {
    return tg_complex<R>(a - b.re, -b.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator*(tg_complex<R> a, R b) {
    return tg_complex<R>(a.re * b, a.im * b);
}
template <typename R>
TG_INLINE tg_complex<R> operator*(R a, tg_complex<R> b) {
    return tg_complex<R>(a * b.re, a * b.im);
}
template <typename R>
TG_INLINE tg_complex<R> operator/(tg_complex<R> a, R b) {
    return tg_complex<R>(a.re / b, a.im / b);
}
template <typename R>
TG_INLINE tg_complex<R> operator/(R a, tg_complex<R> b) {
    return tg_complex<R>(a) / b;
}

template <typename R>
TG_INLINE tg_complex<R>& operator+=(tg_complex<R>& a, tg_complex<R> b) {
    return a = a + b;
}
template <typename R>
TG_INLINE tg_complex<R>& operator-=(tg_complex<R>& a, tg_complex<R> b) {
    return a = a - b;
}
template <typename R>
TG_INLINE tg_complex<R>& operator*=(tg_complex<R>& a, tg_complex<R> b) {
    return a = a * b;
}

// ---- order: by real part, then by imaginary part; a NaN anywhere compares false

template <typename R>
TG_INLINE bool operator==(tg_complex<R> a, tg_complex<R> b) {
    return a.re == b.re && a.im == b.im;
}
template <typename R>
TG_INLINE bool operator!=(tg_complex<R> a, tg_complex<R> b) {
    return a.re != b.re || a.im != b.im;
}
template <typename R>
TG_INLINE bool operator<(tg_complex<R> a, tg_complex<R> b) {
    return (a.re < b.re && a.im == a.im && b.im == b.im) || (a.re == b.re && a.im < b.im);
}
template <typename R>
TG_INLINE bool operator<=(tg_complex<R> a, tg_complex<R> b) {
    return (a.re < b.re && a.im == a.im && b.im == b.im) || (a.re == b.re && a.im <= b.im);
}
template <typename R>
TG_INLINE bool operator>(tg_complex<R> a, tg_complex<R> b) {
    return b < a;
}
template <typename R>
TG_INLINE bool operator>=(tg_complex<R> a, tg_complex<R> b) {
    return b <= a;
}

// ---- functions

template <typename R>
TG_INLINE tg_complex<R> tg_times_i(tg_complex<R> z) {
    return tg_complex<R>(-z.im, z.re);
}
template <typename R>
TG_INLINE tg_complex<R> tg_over_i(tg_complex<R> z) {
    return tg_complex<R>(z.im, -z.re);
}

template <typename R>
TG_INLINE bool tg_finite_part(R x) {
    return x - x == R(0);
}

template <typename R>
TG_INLINE tg_complex<R> exp(tg_complex<R> z) {
    if (z.im == R(0)) return tg_complex<R>(exp(z.re), z.im);
    if (!tg_finite_part(z.re) && !tg_finite_part(z.im) && z.re == z.re) {
        return z.re < R(0) ? tg_complex<R>(R(0), R(0)) : tg_complex<R>(z.re, z.im - z.im);
    }
    const R half = exp(z.re * R(0.5));  // twice: exp(re) alone may overflow where its product with the cosine does not
    if (z.re > R(80)) return tg_complex<R>(half * cos(z.im) * half, half * sin(z.im) * half);
    const R size = exp(z.re);
    return tg_complex<R>(size * cos(z.im), size * sin(z.im));
}

template <typename R>
TG_INLINE tg_complex<R> expm1(tg_complex<R> z) {
    const R s = sin(z.im * R(0.5));
    return tg_complex<R>(expm1(z.re) * cos(z.im) - R(2) * s * s, exp(z.re) * sin(z.im));
}

// log |1 + z| and its like lose all digits near the unit circle unless they go through log1p.
template <typename R>
TG_INLINE R tg_log_size(R re, R im) {
    const R a = fabs(re), b = fabs(im), most = a > b ? a : b, least = a > b ? b : a;
    if (most > R(0.5) && most < R(2)) return R(0.5) * log1p((most - R(1)) * (most + R(1)) + least * least);
    return log(hypot(re, im));
}

template <typename R>
TG_INLINE tg_complex<R> log(tg_complex<R> z) {
    return tg_complex<R>(tg_log_size(z.re, z.im), atan2(z.im, z.re));
}

template <typename R>
TG_INLINE tg_complex<R> log1p(tg_complex<R> z) {
    const R one = R(1) + z.re;
    if (fabs(z.re) < R(0.5) && fabs(z.im) < R(0.5)) {
        return tg_complex<R>(R(0.5) * log1p(z.re * (R(2) + z.re) + z.im * z.im), atan2(z.im, one));
    }
    return tg_complex<R>(tg_log_size(one, z.im), atan2(z.im, one));
}

template <typename R>
TG_INLINE tg_complex<R> exp2(tg_complex<R> z) {
    return exp(z * R(0.6931471805599453));
}
template <typename R>
TG_INLINE tg_complex<R> log2(tg_complex<R> z) {
    return log(z) * R(1.4426950408889634);
}
template <typename R>
TG_INLINE tg_complex<R> log10(tg_complex<R> z) {
    return log(z) * R(0.4342944819032518);
}

template <typename R>
TG_INLINE tg_complex<R> sqrt(tg_complex<R> z) {
    if (z.re == R(0) && z.im == R(0)) return tg_complex<R>(R(0), z.im);
    if (fabs(z.im) > R(0) && !tg_finite_part(z.im) && z.im == z.im) return tg_complex<R>(fabs(z.im), z.im);
    if (!tg_finite_part(z.re) && z.re == z.re) {
        const R none = z.im - z.im;  // 0, or NaN for NaN
        return z.re > R(0) ? tg_complex<R>(z.re, none == none ? copysign(R(0), z.im) : none)
                           : tg_complex<R>(fabs(none), copysign(-z.re, z.im));
    }
    // Scaled by powers of 4 so that neither the sum overflows nor a subnormal loses digits.
    const R big = sizeof(R) == 4 ? R(1e37f) : R(1e307), small = sizeof(R) == 4 ? R(1e-30f) : R(1e-290);
    const R a = fabs(z.re), b = fabs(z.im), most = a > b ? a : b;
    const R in = most > big ? R(0.0625) : most < small ? R(281474976710656.0) : R(1);  // 2**48
    const R out = most > big ? R(4) : most < small ? R(5.9604644775390625e-08) : R(1);  // 2**-24
    const R x = z.re * in, y = z.im * in;
    const R t = sqrt((fabs(x) + hypot(x, y)) * R(0.5));
    if (x >= R(0)) return tg_complex<R>(t * out, y / (R(2) * t) * out);
    return tg_complex<R>(fabs(y) / (R(2) * t) * out, copysign(t, y) * out);
}

template <typename R>
TG_INLINE tg_complex<R> sinh(tg_complex<R> z) {
    if (z.im == R(0)) return tg_complex<R>(sinh(z.re), z.im);
    return tg_complex<R>(sinh(z.re) * cos(z.im), cosh(z.re) * sin(z.im));
}
template <typename R>
TG_INLINE tg_complex<R> cosh(tg_complex<R> z) {
    if (z.im == R(0)) return tg_complex<R>(cosh(z.re), copysign(R(0), z.re) * copysign(R(1), z.im));
    return tg_complex<R>(cosh(z.re) * cos(z.im), sinh(z.re) * sin(z.im));
}
template <typename R>
TG_INLINE tg_complex<R> tanh(tg_complex<R> z) {
    // Kahan, "Branch cuts for complex elementary functions", 1987.
    if (fabs(z.re) > R(20)) {
        return tg_complex<R>(copysign(R(1), z.re), R(4) * sin(z.im) * cos(z.im) * exp(R(-2) * fabs(z.re)));
    }
    const R t = tan(z.im), s = sinh(z.re), beta = R(1) + t * t, size = R(1) + beta * s * s;
    if (!tg_finite_part(t)) return tg_complex<R>(sqrt(R(1) + s * s) / s, R(1) / t);
    return tg_complex<R>(beta * sqrt(R(1) + s * s) * s / size, t / size);
}
template <typename R>
TG_INLINE tg_complex<R> sin(tg_complex<R> z) {
    return tg_over_i(sinh(tg_times_i(z)));
}
template <typename R>
TG_INLINE tg_complex<R> cos(tg_complex<R> z) {
    return cosh(tg_times_i(z));
}
template <typename R>
TG_INLINE tg_complex<R> tan(tg_complex<R> z) {
    return tg_over_i(tanh(tg_times_i(z)));
}

// The inverse functions, after Kahan, too: no cancellation near the branch points, signed zeros choose the branch.
template <typename R>
TG_INLINE tg_complex<R> asin(tg_complex<R> z) {
    const tg_complex<R> s = sqrt(tg_complex<R>(R(1) - z.re, -z.im)), t = sqrt(tg_complex<R>(R(1) + z.re, z.im));
    return tg_complex<R>(atan2(z.re, s.re * t.re - s.im * t.im), asinh(s.re * t.im - s.im * t.re));
}
template <typename R>
TG_INLINE tg_complex<R> acos(tg_complex<R> z) {
    const tg_complex<R> s = sqrt(tg_complex<R>(R(1) - z.re, -z.im)), t = sqrt(tg_complex<R>(R(1) + z.re, z.im));
    return tg_complex<R>(R(2) * atan2(s.re, t.re), asinh(t.re * s.im - t.im * s.re));
}
template <typename R>
TG_INLINE tg_complex<R> acosh(tg_complex<R> z) {
    const tg_complex<R> s = sqrt(tg_complex<R>(z.re - R(1), z.im)), t = sqrt(tg_complex<R>(z.re + R(1), z.im));
    return tg_complex<R>(asinh(s.re * t.re + s.im * t.im), R(2) * atan2(s.im, t.re));
}
template <typename R>
TG_INLINE tg_complex<R> atanh(tg_complex<R> z) {
    const R big = sizeof(R) == 4 ? R(1e15f) : R(1e150), x = z.re, y = z.im;
    if (fabs(x) > big || fabs(y) > big) {  // 1 / z and a quarter turn
        return tg_complex<R>((tg_complex<R>(R(1)) / z).re, copysign(R(1.5707963267948966), y));
    }
    const R size = fabs(x), away = R(1) - size;  // the real part is odd, and near -1 it would cancel
    const R re = R(0.25) * log1p(R(4) * size / (away * away + y * y));
    return tg_complex<R>(copysign(re, x), R(0.5) * atan2(R(2) * y, away * (R(1) + size) - y * y));
}
template <typename R>
TG_INLINE tg_complex<R> asinh(tg_complex<R> z) {
    return tg_over_i(asin(tg_times_i(z)));
}
template <typename R>
TG_INLINE tg_complex<R> atan(tg_complex<R> z) {
    return tg_over_i(atanh(tg_times_i(z)));
}
