// CUDA's vector types: the alignment is the device's, since a 16-byte load needs it there.
#pragma once

#define TG_VECTOR(T, name, align2, align4)                                                                      \
    struct name##1 { T x; };                                                                                    \
    struct alignas(align2) name##2 { T x, y; };                                                                 \
    struct name##3 { T x, y, z; };                                                                              \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                           \
    static inline name##1 make_##name##1(T x) { return {x}; }                                                   \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                           \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                   \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

TG_VECTOR(signed char, char, 2, 4)
TG_VECTOR(unsigned char, uchar, 2, 4)
TG_VECTOR(short, short, 4, 8)
TG_VECTOR(unsigned short, ushort, 4, 8)
TG_VECTOR(int, int, 8, 16)
TG_VECTOR(unsigned, uint, 8, 16)
TG_VECTOR(long, long, 16, 16)
TG_VECTOR(unsigned long, ulong, 16, 16)
TG_VECTOR(long long, longlong, 16, 16)
TG_VECTOR(unsigned long long, ulonglong, 16, 16)
TG_VECTOR(float, float, 8, 16)
TG_VECTOR(double, double, 16, 16)
#undef TG_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
