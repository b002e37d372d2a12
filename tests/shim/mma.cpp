// Products of small matrices by a warp (PTX ISA, mma.sync m16n8k16 and m16n8k8): the last lane to come computes them
// for all.
// The hardware's order of summation is not specified; here the products, exact in double, are added in order, and
// the sum with its addend is rounded once.  The interpreter of PTX (tests/ptx/warps.py) does the same.
#include "state.h"

#include <string.h>

namespace {

struct Brought {
    int kind;
    const unsigned *a, *b;
    float *sums;
};

double number(int kind, unsigned word, int which) {
    const unsigned half = word >> (16 * which) & 0xffff;
    const unsigned bits = kind == 2 ? word & 0xffffe000u : half << 16;
    if (kind == 0) {
        const unsigned short narrow = static_cast<unsigned short>(half);
        _Float16 x;
        memcpy(&x, &narrow, sizeof x);
        return static_cast<double>(x);
    }
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace

extern "C" void tgh_mma(int kind, const unsigned (&a)[4], const unsigned (&b)[2], float (&sums)[4], const char *file,
                        int line) {
    const Brought mine = {kind, a, b, sums};
    tgh_warp(TGH_PRODUCT, 0xffffffffu, reinterpret_cast<uintptr_t>(&mine), 0, file, line);
}

void tg_multiply(const uint64_t (&given)[TG_WARP]) {
    double a[16][16], b[16][8];
    const int kind = reinterpret_cast<const Brought *>(given[0])->kind;
    const int per = kind == 2 ? 1 : 2, depth = 8 * per;
    for (int lane = 0; lane < TG_WARP; lane++) {
        const Brought &its = *reinterpret_cast<const Brought *>(given[lane]);
        const int group = lane / 4, inner = lane % 4;
        for (int e = 0; e < per; e++) {
            const int left = inner * per + e, right = left + 4 * per;
            a[group][left] = number(kind, its.a[0], e);
            a[group + 8][left] = number(kind, its.a[1], e);
            a[group][right] = number(kind, its.a[2], e);
            a[group + 8][right] = number(kind, its.a[3], e);
            b[left][group] = number(kind, its.b[0], e);
            b[right][group] = number(kind, its.b[1], e);
        }
    }
    for (int lane = 0; lane < TG_WARP; lane++) {
        float *sums = reinterpret_cast<const Brought *>(given[lane])->sums;
        for (int r = 0; r < 4; r++) {
            const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
            double total = 0;
            for (int k = 0; k < depth; k++) total += a[row][k] * b[k][column];
            sums[r] = static_cast<float>(total + sums[r]);
        }
    }
}
