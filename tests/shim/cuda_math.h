// CUDA's mathematical functions in the global namespace. They are declared here and not taken from <cmath>:
// no header of the C++ library then has to be read for each kernel, and exp(float) cannot be anything but expf.
#pragma once

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VAL __builtin_huge_val()

#define TG_MATH1(name)                                         \
    extern "C" double name(double) noexcept;                   \
    extern "C" float name##f(float) noexcept;                  \
    static inline float name(float x) { return name##f(x); }
#define TG_MATH2(name)                                                          \
    extern "C" double name(double, double) noexcept;                            \
    extern "C" float name##f(float, float) noexcept;                            \
    static inline float name(float x, float y) { return name##f(x, y); }        \
    static inline double name(float x, double y) { return name((double)x, y); } \
    static inline double name(double x, float y) { return name(x, (double)y); }
// What the device has and libm has not: the formula is in double, so float results err by their rounding only.
#define TG_MATH_OWN(name, formula)                                                                \
    static inline double name(double x) { return formula; }                                       \
    static inline float name##f(float given) { double x = given; return (float)(formula); }       \
    static inline float name(float x) { return name##f(x); }

TG_MATH1(acos) TG_MATH1(acosh) TG_MATH1(asin) TG_MATH1(asinh) TG_MATH1(atan) TG_MATH1(atanh) TG_MATH1(cbrt)
TG_MATH1(ceil) TG_MATH1(cos) TG_MATH1(cosh) TG_MATH1(erf) TG_MATH1(erfc) TG_MATH1(exp) TG_MATH1(exp2) TG_MATH1(exp10)
TG_MATH1(expm1) TG_MATH1(fabs) TG_MATH1(floor) TG_MATH1(j0) TG_MATH1(j1) TG_MATH1(lgamma) TG_MATH1(log) TG_MATH1(log10)
TG_MATH1(log1p) TG_MATH1(log2) TG_MATH1(logb) TG_MATH1(nearbyint) TG_MATH1(rint) TG_MATH1(round) TG_MATH1(sin)
TG_MATH1(sinh) TG_MATH1(sqrt) TG_MATH1(tan) TG_MATH1(tanh) TG_MATH1(tgamma) TG_MATH1(trunc) TG_MATH1(y0) TG_MATH1(y1)
TG_MATH2(atan2) TG_MATH2(copysign) TG_MATH2(fdim) TG_MATH2(fmax) TG_MATH2(fmin) TG_MATH2(fmod) TG_MATH2(hypot)
TG_MATH2(nextafter) TG_MATH2(pow) TG_MATH2(remainder)
TG_MATH_OWN(rsqrt, 1.0 / sqrt(x))
TG_MATH_OWN(rcbrt, 1.0 / cbrt(x))
TG_MATH_OWN(normcdf, 0.5 * erfc(x * -0.70710678118654752440))
// Special functions by ways that are slow and sure: series of positive terms, and Newton's steps on what libm has.
static inline double tg_scaled_erfc(double x) {
    if (x > 25.0) {
        double y = 0.5 / (x * x), sum = 1.0;
        for (int k = 8; k; k--) sum = 1.0 - (2 * k - 1) * y * sum;
        return sum / (x * 1.7724538509055160273);
    }
    if (x < -27.0) return __builtin_inf();
    double square = x * x;
    return exp(square) * (1.0 + __builtin_fma(x, x, -square)) * erfc(x);
}
static inline double tg_inverse_erfc(double q) {
    if (!(q >= 0.0 && q <= 2.0)) return __builtin_nan("");
    if (q > 1.0) return -tg_inverse_erfc(2.0 - q);
    if (q == 0.0) return __builtin_inf();
    double r = q > 0.5 ? (1.0 - q) * 0.88622692545275801365 : sqrt(-log(q));
    for (int step = 0; step < 40; step++) {
        double over = tg_scaled_erfc(r), left = (erfc(r) - q) * exp(r * r);
        if (q <= 0.5) left = (log(over) - r * r - log(q)) * over;
        double change = left * 0.88622692545275801365;
        r += change;
        if (fabs(change) <= 1e-17 * fabs(r)) break;
    }
    return r;
}
static inline double tg_inverse_erf(double x) {
    if (fabs(x) > 0.5) return copysign(tg_inverse_erfc(1.0 - fabs(x)), x);
    double r = x * 0.88622692545275801365;
    for (int step = 0; step < 20; step++) r -= (erf(r) - x) * exp(r * r) * 0.88622692545275801365;
    return r;
}
static inline double tg_modified_bessel(double x, int order) {
    if (!(fabs(x) < 720.0)) return x != x ? x : order && x < 0.0 ? -__builtin_inf() : __builtin_inf();
    double y = x * x * 0.25, term = order ? x * 0.5 : 1.0, sum = term;
    for (int k = 1; k < 1200 && fabs(term) > 1e-18 * fabs(sum); k++) sum += term *= y / ((double)k * (k + order));
    return sum;
}
TG_MATH_OWN(erfcx, tg_scaled_erfc(x))
TG_MATH_OWN(erfinv, tg_inverse_erf(x))
TG_MATH_OWN(erfcinv, tg_inverse_erfc(x))
TG_MATH_OWN(normcdfinv, -1.41421356237309504880 * tg_inverse_erfc(2.0 * x))
TG_MATH_OWN(cyl_bessel_i0, tg_modified_bessel(x, 0))
TG_MATH_OWN(cyl_bessel_i1, tg_modified_bessel(x, 1))
#undef TG_MATH1
#undef TG_MATH2
#undef TG_MATH_OWN

extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double scalbn(double, int) noexcept;
extern "C" float scalbnf(float, int) noexcept;
extern "C" double frexp(double, int *) noexcept;
extern "C" float frexpf(float, int *) noexcept;
extern "C" double modf(double, double *) noexcept;
extern "C" float modff(float, float *) noexcept;
extern "C" int ilogb(double) noexcept;
extern "C" int ilogbf(float) noexcept;
extern "C" long lrint(double) noexcept;
extern "C" long lrintf(float) noexcept;
extern "C" long lround(double) noexcept;
extern "C" long lroundf(float) noexcept;
extern "C" long long llrint(double) noexcept;
extern "C" long long llrintf(float) noexcept;
extern "C" long long llround(double) noexcept;
extern "C" long long llroundf(float) noexcept;
extern "C" void sincos(double, double *, double *) noexcept;
extern "C" void sincosf(float, float *, float *) noexcept;
extern "C" int abs(int) noexcept;
extern "C" long labs(long) noexcept;
extern "C" long long llabs(long long) noexcept;
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float ldexp(float x, int n) { return ldexpf(x, n); }
static inline float scalbn(float x, int n) { return scalbnf(x, n); }
static inline float frexp(float x, int *n) { return frexpf(x, n); }
static inline float modf(float x, float *whole) { return modff(x, whole); }
static inline int ilogb(float x) { return ilogbf(x); }
static inline long lrint(float x) { return lrintf(x); }
static inline long lround(float x) { return lroundf(x); }
static inline long long llrint(float x) { return llrintf(x); }
static inline long long llround(float x) { return llroundf(x); }
static inline void sincos(float x, float *s, float *c) { sincosf(x, s, c); }
static inline double pow(double x, int n) { return pow(x, (double)n); }
static inline float pow(float x, int n) { return powf(x, (float)n); }
static inline double sqrt(int x) { return sqrt((double)x); }
static inline long abs(long x) { return labs(x); }
static inline long long abs(long long x) { return llabs(x); }
static inline float abs(float x) { return fabsf(x); }
static inline double abs(double x) { return fabs(x); }

// sin(pi x) is exact at multiples of one half on the device: take the whole turns away before multiplying by pi.
static inline double sinpi(double x) {
    double part = fmod(x, 2.0);
    if (part == trunc(part)) return copysign(0.0, x);
    if (fabs(part) > 0.5 && fabs(part) <= 1.5) part = copysign(1.0, part) - part;
    else if (fabs(part) > 1.5) part -= copysign(2.0, part);
    return sin(part * 3.14159265358979323846);
}
static inline double cospi(double x) { return sinpi(0.5 - fabs(fmod(x, 2.0))) + 0.0; }
static inline float sinpif(float x) { return (float)sinpi((double)x); }
static inline float cospif(float x) { return (float)cospi((double)x); }
static inline float sinpi(float x) { return sinpif(x); }
static inline float cospi(float x) { return cospif(x); }

#define TG_CLASSIFY(T)                                                    \
    static inline bool isnan(T x) { return __builtin_isnan(x); }          \
    static inline bool isinf(T x) { return __builtin_isinf_sign(x) != 0; } \
    static inline bool isfinite(T x) { return __builtin_isfinite(x); }    \
    static inline bool signbit(T x) { return __builtin_signbit(x) != 0; }
TG_CLASSIFY(float)
TG_CLASSIFY(double)
#undef TG_CLASSIFY

// Like the device's: for floats the NaN is the operand that loses.
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline float min(float a, float b) { return fminf(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(float a, double b) { return fmax((double)a, b); }
static inline double min(float a, double b) { return fmin((double)a, b); }
static inline double max(double a, float b) { return fmax(a, (double)b); }
static inline double min(double a, float b) { return fmin(a, (double)b); }
#define TG_MINMAX(A, B, T)                                                          \
    static inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }             \
    static inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }
TG_MINMAX(int, int, int)
TG_MINMAX(unsigned, unsigned, unsigned)
TG_MINMAX(int, unsigned, unsigned)
TG_MINMAX(unsigned, int, unsigned)
TG_MINMAX(long, long, long)
TG_MINMAX(unsigned long, unsigned long, unsigned long)
TG_MINMAX(long long, long long, long long)
TG_MINMAX(unsigned long long, unsigned long long, unsigned long long)
TG_MINMAX(long long, unsigned long long, unsigned long long)
TG_MINMAX(unsigned long long, long long, unsigned long long)
#undef TG_MINMAX

// The quick versions differ from the exact ones by a few units in the last place; no test can rely on which.
static inline float __expf(float x) { return expf(x); }
static inline float __exp10f(float x) { return exp10f(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __log2f(float x) { return log2f(x); }
static inline float __log10f(float x) { return log10f(x); }
static inline float __sinf(float x) { return sinf(x); }
static inline float __cosf(float x) { return cosf(x); }
static inline float __tanf(float x) { return tanf(x); }
static inline float __powf(float x, float y) { return powf(x, y); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline float fdividef(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }

// Names that pin one rounding: this compiler is told never to contract, so the plain operation is it.
#define TG_ROUNDED(T, prefix)                                                          \
    static inline T prefix##add_rn(T a, T b) { return a + b; }                         \
    static inline T prefix##sub_rn(T a, T b) { return a - b; }                         \
    static inline T prefix##mul_rn(T a, T b) { return a * b; }                         \
    static inline T prefix##div_rn(T a, T b) { return a / b; }
TG_ROUNDED(float, __f)
TG_ROUNDED(double, __d)
#undef TG_ROUNDED
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline double __dsqrt_rn(double x) { return sqrt(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline double __drcp_rn(double x) { return 1.0 / x; }

// Conversions with a named rounding saturate on the device, where C++ leaves the result undefined.
#define TG_TO_INTEGER(T, name, F, low, high, invalid)                                  \
    static inline T name(F x) {                                                        \
        if (__builtin_isnan(x)) return invalid;                                        \
        return x <= (F)low ? low : x >= (F)high ? high : (T)x;                         \
    }
#define TG_ROUND_TO(T, name, F, low, high, invalid)                                    \
    TG_TO_INTEGER(T, name##_rz, F, low, high, invalid)                                 \
    static inline T name##_rn(F x) { return name##_rz(rint(x)); }                      \
    static inline T name##_rd(F x) { return name##_rz(floor(x)); }                     \
    static inline T name##_ru(F x) { return name##_rz(ceil(x)); }
#define TG_LEAST (-9223372036854775807ll - 1)
TG_ROUND_TO(int, __float2int, float, (-2147483647 - 1), 2147483647, 0)
TG_ROUND_TO(unsigned, __float2uint, float, 0u, 4294967295u, 0)
TG_ROUND_TO(int, __double2int, double, (-2147483647 - 1), 2147483647, (-2147483647 - 1))
TG_ROUND_TO(unsigned, __double2uint, double, 0u, 4294967295u, 2147483648u)
TG_ROUND_TO(long long, __float2ll, float, TG_LEAST, 9223372036854775807ll, TG_LEAST)
TG_ROUND_TO(long long, __double2ll, double, TG_LEAST, 9223372036854775807ll, TG_LEAST)
TG_ROUND_TO(unsigned long long, __float2ull, float, 0ull, 18446744073709551615ull, 9223372036854775808ull)
TG_ROUND_TO(unsigned long long, __double2ull, double, 0ull, 18446744073709551615ull, 9223372036854775808ull)
#undef TG_TO_INTEGER
#undef TG_ROUND_TO
#undef TG_LEAST
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __ll2float_rn(long long x) { return (float)x; }
static inline float __ull2float_rn(unsigned long long x) { return (float)x; }
static inline double __int2double_rn(int x) { return x; }
static inline double __uint2double_rn(unsigned x) { return x; }
static inline double __ll2double_rn(long long x) { return (double)x; }
static inline double __ull2double_rn(unsigned long long x) { return (double)x; }
static inline float __double2float_rn(double x) { return (float)x; }

#define TG_BITS(To, name, From)                                \
    static inline To name(From from) {                         \
        To to;                                                 \
        __builtin_memcpy(&to, &from, sizeof to);               \
        return to;                                             \
    }
TG_BITS(int, __float_as_int, float)
TG_BITS(unsigned, __float_as_uint, float)
TG_BITS(float, __int_as_float, int)
TG_BITS(float, __uint_as_float, unsigned)
TG_BITS(long long, __double_as_longlong, double)
TG_BITS(double, __longlong_as_double, long long)
#undef TG_BITS
static inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
static inline int __double2loint(double x) { return (int)__double_as_longlong(x); }
static inline double __hiloint2double(int high, int low) {
    return __longlong_as_double((long long)(((unsigned long long)(unsigned)high << 32) | (unsigned)low));
}

// Integer intrinsics.
static inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline unsigned __brev(unsigned x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
static inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = selector >> (4 * i);
        unsigned byte = (unsigned)(bytes >> (8 * (pick & 7))) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (n & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (n & 31));
}
