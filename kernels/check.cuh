// What a kernel finds wrong with values, told to the host without a copy and without a wait.
//
// There is one record for a device, in pinned memory of the host, which a device writes to by itself; nothing is written
// while all is well.  The first launch that finds something wrong takes the record (`ticket`, which no other launch
// has), and of its threads the least and the greatest wrong value are kept: no order of threads shows.  The host reads
// the record when it has waited for the device anyway (tapegrad/device/checks.py).
#pragma once
#include "reduce.cuh"

struct tg_record {
    unsigned long long ticket;
    long long kind, low, high, least, most;
};

// The least and the greatest of what a thread has found wrong.
struct tg_wrong {
    long long least = tg_minimum<long long>::identity(), most = tg_maximum<long long>::identity();

    TG_INLINE void add(long long value) {
        least = tg_min(least, value);
        most = tg_max(most, value);
    }
};

struct tg_check {
    tg_record* at;
    unsigned long long ticket;
    long long kind, low, high;

    // Called once by all threads of a warp, which joins first: each access to the record crosses the bus.
    TG_INLINE void tell(tg_wrong wrong) const {
        if (!__any_sync(TG_ALL_LANES, wrong.least <= wrong.most)) return;
        const long long least = tg_warp_reduce<tg_minimum<long long>>(wrong.least);
        const long long most = tg_warp_reduce<tg_maximum<long long>>(wrong.most);
        if (threadIdx.x % TG_WARP != 0) return;
        const unsigned long long before = atomicCAS(&at->ticket, 0ULL, ticket);
        if (before != 0 && before != ticket) return;  // an earlier launch was first
        if (before == 0) {
            at->kind = kind;
            at->low = low;
            at->high = high;
        }
        atomicMin(&at->least, least);
        atomicMax(&at->most, most);
    }
};
