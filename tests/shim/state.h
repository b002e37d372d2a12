// What the parts of the runtime share. A launch holds a lock, so plain globals do.
#pragma once

#include "runtime.h"

#include <pthread.h>

static const size_t STACK_BYTES = 128 << 10, GUARD_BYTES = 4096;  // of a fibre

enum { TG_MAX_THREADS = 1024, TG_WARP = 32, TG_MAX_SHARED = 227 * 1024, TG_MAX_STATIC_SHARED = 48 * 1024 };

struct TgCoordinates {
    unsigned x, y, z;
};

struct TgExtent {
    uintptr_t low, high;
};

// Where an access stands.
struct TgPlace {
    uint64_t pc;
    const char *file;  // null: the pc tells
    int line;
};

struct TgFibre;

enum TgStatus { TG_READY, TG_AT_BARRIER, TG_AT_WARP, TG_EXITED };

struct TgThread {
    TgCoordinates at;
    TgFibre *fibre;
    TgStatus status;
    const char *file;  // where it waits
    int line;
    int kind, vote;    // of what it waits for
    unsigned mask, source;
    uint64_t value;    // what it brings to a warp collective, and then what it takes away
};

// A compiled library's own memory, found once when it is loaded.
struct TgModule {
    uint64_t tls_module, tls_size;
    uint64_t low, high;
};

struct TgLaunch {
    const TgKernel *kernel;
    const TgModule *module;
    uint32_t grid[3], block[3];
    uint64_t shared;
    const unsigned char *args;  // every argument begins at a multiple of 16
    uint32_t order;             // 0 forward, 1 reverse, 2 shuffle
    uint32_t check;
    uint64_t seed;
    double seconds;             // processor time after which a launch is taken to hang
    // the answer
    uint64_t fault_pc;          // the instruction at fault, 0 where the message has the place
    char fault[1000];
};

struct TgState {
    TgLaunch *launch;
    unsigned threads, current;
    uint64_t block, block_count;
    TgThread thread[TG_MAX_THREADS];
    unsigned order[TG_MAX_THREADS];  // in which the block's threads begin
    void *arguments[512];
    bool faulted;
    uintptr_t stack_low, stack_high;  // of the running fibre
    uintptr_t static_low, static_high;
    pthread_t os_thread;               // the one that launched
    volatile bool in_fibre, allocating;  // what a signal finds running; memory is never left half allocated
};
extern TgState tg;

extern "C" unsigned char tg_dynamic_shared[];
extern "C" TgCoordinates threadIdx, blockIdx, blockDim, gridDim;

// Notes a fault; the running fibre, if any, has to be abandoned then. tg_fault does both for the running thread.
void tg_report(unsigned thread, uint64_t pc, const char *format, ...) __attribute__((format(printf, 3, 4)));
void tg_block_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));  // of no thread in particular
[[noreturn]] void tg_abandon();
[[noreturn]] void tg_fault(uint64_t pc, const char *format, ...) __attribute__((format(printf, 2, 3)));

void tg_multiply(const uint64_t (&given)[TG_WARP]);  // by what all lanes of a warp have brought

void tg_run_block();
void tg_reset_fibres();  // what a fault left standing is gone

// What the scheduler tells the checks.
void tg_check_launch();
void tg_check_block();
void tg_check_barrier();
void tg_check_syncwarp(unsigned first, unsigned mask);
bool tg_check_unwritten();   // whether a read of unwritten shared memory was reported now
void tg_first_unwritten();   // such a read explains what follows from it, so it goes before another fault
void tg_access(uintptr_t address, size_t size, bool write, bool atomic, const TgPlace &place);

void tg_settle_extents();                            // at a launch: what is registered now
const TgExtent *tg_extent_at(uintptr_t address);     // the last that begins at or below the address, or null
const TgExtent *tg_extent_above(uintptr_t address);  // the first that begins above it, or null

void tg_catch_signals();  // and the clock, so that a launch always ends
void tg_start_clock(double seconds);
bool tg_set_clock(double seconds);
