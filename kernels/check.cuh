// What a kernel finds wrong with values, told to the host without a copy and without a wait.
//
// There is one record for a device, in pinned memory of the host, which a device writes to by itself; nothing is written
// while all is well.  The first launch that finds something wrong takes the record (`ticket`, which no other launch
// has), and of its threads the least and the greatest wrong value are kept: no order of threads shows.  The host reads
// the record when it has waited for the device anyway (tapegrad/device/checks.py).
#pragma once
#include "scalar.cuh"

struct tg_record {
    unsigned long long ticket;
    long long kind, low, high, least, most;
};

struct tg_check {
    tg_record* at;
    unsigned long long ticket;
    long long kind, low, high;

    TG_INLINE void wrong(long long value) const {
        const unsigned long long before = atomicCAS(&at->ticket, 0ULL, ticket);
        if (before != 0 && before != ticket) return;  // an earlier launch was first
        at->kind = kind;
        at->low = low;
        at->high = high;
        atomicMin(&at->least, value);
        atomicMax(&at->most, value);
    }
};
