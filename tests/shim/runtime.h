// What a compiled kernel and the runtime library say to each other.
#pragma once

#include <stddef.h>
#include <stdint.h>

// One kernel as the launcher sees it: sizes and kinds describe its parameters.
struct TgKernel {
    const char *name;
    void (*run)(void **args);
    int count;
    const unsigned *sizes;
    const char *kinds;  // p pointer, i integer, f floating point, s anything else
};

enum TgWarpKind { TGH_SYNCWARP, TGH_SHUFFLE, TGH_BALLOT, TGH_MATCH, TGH_PRODUCT };
enum TgVote { TGH_VOTE_NONE, TGH_VOTE_AND, TGH_VOTE_OR, TGH_VOTE_COUNT };

extern "C" {
uint64_t tgh_warp(int kind, unsigned mask, uint64_t value, unsigned source, const char *file, int line);
int tgh_barrier(int vote, int value, const char *file, int line);
void tgh_atomic(const volatile void *address, unsigned size, const char *file, int line);
void tgh_fence();
void tgh_watch(const void *address, size_t size, int write);
unsigned tgh_lane();
// A warp's product of matrices; kind of their elements: 0 float16, 1 bfloat16, 2 TF32.
void tgh_mma(int kind, const unsigned (&a)[4], const unsigned (&b)[2], float (&sums)[4], const char *file, int line);
[[noreturn]] void tgh_trap(const char *what, const char *file, int line);
}
