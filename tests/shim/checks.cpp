// What check=True finds: what is known about each byte that a kernel touches, and what follows from it.
//
// Time is one counter that moves at launches, blocks, barriers and fences and never goes back, so what was noted about
// a byte in an earlier block or launch is old by its time alone and nothing is cleared in between. Two accesses of
// different threads are ordered when a barrier lies between them, a __syncwarp that joins both, or, over blocks, a
// fence with an atomic operation after the one and an atomic operation before the other.
#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- what is known about each byte ----

// An access: time (32 bits), block (21), atomic (1), thread (10).
typedef uint64_t Access;
static const uint64_t BLOCKS = (1 << 21) - 1;
static unsigned thread_of(Access access) { return access & 1023; }
static bool is_atomic(Access access) { return access >> 10 & 1; }
static uint64_t block_of(Access access) { return access >> 11 & BLOCKS; }
static uint32_t time_of(Access access) { return static_cast<uint32_t>(access >> 32); }

struct Byte {
    Access write, read[2];  // the last write, and the last reads of two different threads
};

enum { PAGE_BITS = 9, PAGE_BYTES = 1 << PAGE_BITS };
struct Page {
    uintptr_t number;
    Byte *bytes;
};

static Byte dynamic_bytes[TG_MAX_SHARED], static_bytes[TG_MAX_STATIC_SHARED];
static Page *pages;  // of global memory: open addressing, the room a power of two
static size_t page_count, page_room;
static uintptr_t last_number = ~static_cast<uintptr_t>(0);
static Byte *last_bytes;

static uint32_t now = 1, launch_time, block_time, barrier_time, fence_time, acquire_time;
static uint32_t seen[TG_MAX_THREADS][TG_WARP];  // up to when a thread knows what a lane of its warp did
static uint32_t *release_time;                  // of every block, by the block's number
static size_t release_room;

static struct {
    bool set;
    unsigned thread;
    uint64_t pc;
    char where[200];
} unwritten;  // a read of shared memory that nobody had written

static void forget_pages() {
    for (size_t i = 0; i < page_room; i++) free(pages[i].bytes);
    free(pages);
    pages = nullptr;
    page_count = page_room = 0;
    last_number = ~static_cast<uintptr_t>(0);
}

static size_t slot_of(uintptr_t number) {
    size_t slot = (number * 0x9e3779b97f4a7c15ull >> 20) & (page_room - 1);
    while (pages[slot].bytes && pages[slot].number != number) slot = (slot + 1) & (page_room - 1);
    return slot;
}

static Byte *bytes_of_page(uintptr_t number) {
    if (number == last_number) return last_bytes;
    tg.allocating = true;
    if (2 * page_count >= page_room) {
        Page *old = pages;
        const size_t old_room = page_room;
        page_room = old_room ? 2 * old_room : 1024;
        pages = static_cast<Page *>(calloc(page_room, sizeof *pages));
        if (!pages) abort();
        for (size_t i = 0; i < old_room; i++)
            if (old[i].bytes) pages[slot_of(old[i].number)] = old[i];
        free(old);
    }
    Page &page = pages[slot_of(number)];
    if (!page.bytes) {
        page.number = number;
        page.bytes = static_cast<Byte *>(calloc(PAGE_BYTES, sizeof(Byte)));
        if (!page.bytes) abort();
        page_count++;
    }
    tg.allocating = false;
    last_number = number;
    return last_bytes = page.bytes;
}

// ---- the scheduler's news ----

void tg_check_launch() {
    if (!tg.launch->check) return;
    tg_settle_extents();
    if (now > 1u << 31) {  // the counter would overflow: begin anew
        memset(dynamic_bytes, 0, sizeof dynamic_bytes);
        memset(static_bytes, 0, sizeof static_bytes);
        memset(seen, 0, sizeof seen);
        forget_pages();
        now = 1;
    }
    if (page_count > 20000) forget_pages();  // a quarter of a gigabyte
    const size_t blocks = tg.block_count < 1 << 21 ? tg.block_count : 1 << 21;
    if (blocks > release_room) {
        free(release_time);
        release_time = static_cast<uint32_t *>(malloc(blocks * sizeof *release_time));
        release_room = release_time ? blocks : 0;
        if (!release_time) abort();
    }
    memset(release_time, 0, blocks * sizeof *release_time);
    launch_time = ++now;
}

void tg_check_block() {
    unwritten.set = false;
    if (!tg.launch->check) return;
    block_time = barrier_time = ++now;
    fence_time = acquire_time = 0;
}

// A read of unwritten bytes may be the first half of a race, which is the better explanation: wait until no other
// thread can write them any more.
bool tg_check_unwritten() {
    if (!unwritten.set) return false;
    unwritten.set = false;
    tg_report(unwritten.thread, unwritten.pc, "uninitialised shared memory: %s", unwritten.where);
    return true;
}

void tg_first_unwritten() {
    if (tg_check_unwritten()) tg_abandon();
}

void tg_check_barrier() {
    if (tg.launch->check) barrier_time = ++now;
}

void tg_check_syncwarp(unsigned first, unsigned mask) {
    if (!tg.launch->check) return;
    uint32_t joined[TG_WARP] = {};
    ++now;
    for (unsigned i = 0; i < TG_WARP; i++)
        for (unsigned j = 0; mask >> i & 1 && j < TG_WARP; j++)
            if (seen[first + i][j] > joined[j]) joined[j] = seen[first + i][j];
    for (unsigned i = 0; i < TG_WARP; i++)
        if (mask >> i & 1) joined[i] = now;
    for (unsigned i = 0; i < TG_WARP; i++)
        if (mask >> i & 1) memcpy(seen[first + i], joined, sizeof joined);
}

// ---- one access ----

// Whether something orders the earlier access before one of the running thread; `since` is when the memory was new.
static bool ordered(Access before, uint32_t since) {
    const uint32_t time = time_of(before);
    if (time < since) return true;
    const uint64_t block = block_of(before);
    if (block != (tg.block & BLOCKS)) {
        const uint32_t released = release_time[block];
        return time < released && released < acquire_time;
    }
    const unsigned thread = thread_of(before);
    return thread == tg.current || time < barrier_time ||
           (thread / TG_WARP == tg.current / TG_WARP && time < seen[tg.current][thread % TG_WARP]);
}

static void place_text(char *text, size_t size, const TgPlace &place) {
    text[0] = 0;
    if (place.file) snprintf(text, size, ", at %s:%d", place.file, place.line);
}

[[noreturn]] static void race(Access other, bool wrote, const char *verb, const char *what, const TgPlace &place) {
    char where[300], whom[100];
    place_text(where, sizeof where, place);
    const TgCoordinates at = tg.thread[thread_of(other)].at;
    const uint64_t block = block_of(other), x = tg.launch->grid[0], y = tg.launch->grid[1];
    int used = snprintf(whom, sizeof whom, "thread (%u,%u,%u)", at.x, at.y, at.z);
    if (block != (tg.block & BLOCKS))
        snprintf(whom + used, sizeof whom - static_cast<size_t>(used), " of block (%llu,%llu,%llu)", block % x + 0ull,
                 block / x % y + 0ull, block / x / y + 0ull);
    unwritten.set = false;
    tg_fault(place.pc, "missing barrier: it %s %s, which %s %s%s with nothing between that orders the two%s", verb,
             what, whom, wrote ? "wrote" : "read", is_atomic(other) ? " atomically" : "", where);
}

[[noreturn]] static void out_of_bounds(uintptr_t address, size_t size, const char *verb, const TgPlace &place) {
    char where[300], detail[200] = "";
    place_text(where, sizeof where, place);
    const TgExtent *near = tg_extent_at(address), *next = tg_extent_above(address);
    const size_t past = near ? address - near->high : SIZE_MAX, before = next ? next->low - address : SIZE_MAX;
    const size_t own = near ? near->high - near->low : 0, close = 1 << 20;
    if (near && address < near->high)
        snprintf(detail, sizeof detail, ", over the end of an allocation of %zu", own);
    else if (past <= before && past < close)
        snprintf(detail, sizeof detail, ", %zu bytes past the end of an allocation of %zu", past, own);
    else if (before < close)
        snprintf(detail, sizeof detail, ", %zu bytes before an allocation of %zu", before, next->high - next->low);
    tg_first_unwritten();
    tg_fault(place.pc, "out of bounds: it %s %zu bytes at %#zx%s%s", verb, size, address, detail, where);
}

[[noreturn]] static void beyond_shared(size_t offset, size_t size, size_t room, const char *verb, const char *kind,
                                       const TgPlace &place) {
    char where[300];
    place_text(where, sizeof where, place);
    tg_first_unwritten();
    tg_fault(place.pc, "out of bounds: it %s %zu bytes at offset %zu of %zu bytes of %s shared memory%s", verb, size,
             offset, room, kind, where);
}

static void note_unwritten(size_t offset, const char *kind, const TgPlace &place) {
    char where[100];
    place_text(where, sizeof where, place);
    unwritten.set = true;
    unwritten.thread = tg.current;
    unwritten.pc = place.pc;
    snprintf(unwritten.where, sizeof unwritten.where,
             "it reads offset %zu of %s shared memory, which no thread of the block wrote%s", offset, kind, where);
}

// The linker's names for the ends of the section that holds threadIdx and its like.
extern "C" const char __start_tg_coordinates[], __stop_tg_coordinates[];

static bool within(uintptr_t address, uintptr_t low, uintptr_t high) { return address - low < high - low; }

void tg_access(uintptr_t address, size_t size, bool write, bool atomic, const TgPlace &place) {
    if (within(address, tg.stack_low, tg.stack_high) || size == 0) return;
    const uintptr_t dynamic = reinterpret_cast<uintptr_t>(tg_dynamic_shared);
    const char *const verb = atomic ? "atomically changes" : write ? "writes" : "reads";
    const char *kind = "dynamic";
    Byte *bytes = nullptr;
    TgExtent extent;
    if (within(address, dynamic, dynamic + TG_MAX_SHARED)) {
        extent = {dynamic, dynamic + tg.launch->shared};
        bytes = dynamic_bytes + (address - dynamic);
    } else if (within(address, tg.static_low, tg.static_high)) {
        extent = {tg.static_low, tg.static_high};
        bytes = static_bytes + (address - tg.static_low);
        kind = "static";
    } else if (within(address, reinterpret_cast<uintptr_t>(__start_tg_coordinates),
                      reinterpret_cast<uintptr_t>(__stop_tg_coordinates)) ||
               within(address, tg.launch->module->low, tg.launch->module->high)) {
        return;
    } else {
        const TgExtent *found = tg_extent_at(address);
        if (!found || address + size > found->high) out_of_bounds(address, size, verb, place);
        extent = *found;
    }
    if (address + size > extent.high)
        beyond_shared(address - extent.low, size, extent.high - extent.low, verb, kind, place);
    const bool shared = bytes;
    const uint32_t since = shared ? block_time : launch_time;
    const Access time = static_cast<Access>(now) << 32, block = (tg.block & BLOCKS) << 11;
    const Access self = time | block | atomic << 10 | tg.current;
    for (size_t i = 0; i < size; i++) {
        if (!shared && (i == 0 || (address + i) % PAGE_BYTES == 0))
            bytes = bytes_of_page((address + i) >> PAGE_BITS) + (address + i) % PAGE_BYTES - i;
        Byte &byte = bytes[i];
        const bool clash = !(atomic && is_atomic(byte.write)) && !ordered(byte.write, since);
        Access reader = 0;
        for (int k = 0; write && !reader && k < 2; k++)
            if (!ordered(byte.read[k], since)) reader = byte.read[k];
        if (clash || reader) {
            char what[120];
            const size_t offset = address + i - extent.low, room = extent.high - extent.low;
            if (shared) snprintf(what, sizeof what, "offset %zu of %s shared memory", offset, kind);
            else snprintf(what, sizeof what, "offset %zu of a global allocation of %zu bytes", offset, room);
            race(clash ? byte.write : reader, clash, verb, what, place);
        }
        if (shared && (!write || atomic) && time_of(byte.write) < block_time && !unwritten.set)
            note_unwritten(address + i - extent.low, kind, place);
        if (write) {
            byte.write = self;
        } else {
            const Access last = byte.read[0];
            if (thread_of(last) != tg.current || block_of(last) != (tg.block & BLOCKS)) byte.read[1] = last;
            byte.read[0] = self;
        }
    }
}

extern "C" void tgh_atomic(const volatile void *pointer, unsigned size, const char *file, int line) {
    if (!tg.launch->check) return;
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (address % size)
        tg_fault(0, "misaligned access: an atomic operation on %u bytes at %#zx, at %s:%d", size, address, file, line);
    if (fence_time) release_time[tg.block & BLOCKS] = fence_time;
    acquire_time = ++now;
    tg_access(address, size, true, true, {0, file, line});
}

extern "C" void tgh_fence() {
    if (tg.launch->check) fence_time = ++now;
}
