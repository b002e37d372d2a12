// The memory that kernels may touch, as allocators and launches register it.
#include "state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t extents_lock = PTHREAD_MUTEX_INITIALIZER;
static TgExtent *registered, *allowed;  // as told; and sorted, with what overlaps made one
static size_t registered_count, registered_room, allowed_count, allowed_room, last_allowed;

static bool make_room(TgExtent **list, size_t *room, size_t count) {
    if (count <= *room) return true;
    void *memory = realloc(*list, 2 * count * sizeof **list);
    if (!memory) return false;
    *list = static_cast<TgExtent *>(memory);
    *room = 2 * count;
    return true;
}

extern "C" void tg_register(uint64_t address, uint64_t bytes) {
    pthread_mutex_lock(&extents_lock);
    if (make_room(&registered, &registered_room, registered_count + 1))
        registered[registered_count++] = {address, address + bytes};
    pthread_mutex_unlock(&extents_lock);
}

extern "C" void tg_unregister(uint64_t address) {
    pthread_mutex_lock(&extents_lock);
    // From the end: what a launch registered goes before what an allocator registered at the same address.
    for (size_t i = registered_count; i-- > 0;) {
        if (registered[i].low != address) continue;
        memmove(registered + i, registered + i + 1, (--registered_count - i) * sizeof *registered);
        break;
    }
    pthread_mutex_unlock(&extents_lock);
}

static int by_low(const void *a, const void *b) {
    const uintptr_t x = static_cast<const TgExtent *>(a)->low, y = static_cast<const TgExtent *>(b)->low;
    return x < y ? -1 : x > y;
}

void tg_settle_extents() {
    pthread_mutex_lock(&extents_lock);
    allowed_count = last_allowed = 0;
    if (make_room(&allowed, &allowed_room, registered_count + 1) && registered_count) {
        memcpy(allowed, registered, registered_count * sizeof *allowed);
        qsort(allowed, registered_count, sizeof *allowed, by_low);
        for (size_t i = 0; i < registered_count; i++) {
            if (allowed_count && allowed[i].low < allowed[allowed_count - 1].high) {
                TgExtent &last = allowed[allowed_count - 1];
                if (allowed[i].high > last.high) last.high = allowed[i].high;
            } else {
                allowed[allowed_count++] = allowed[i];
            }
        }
    }
    pthread_mutex_unlock(&extents_lock);
}

const TgExtent *tg_extent_at(uintptr_t address) {
    if (last_allowed < allowed_count) {
        const TgExtent &last = allowed[last_allowed];
        if (address - last.low < last.high - last.low) return &last;
    }
    size_t low = 0, high = allowed_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (allowed[middle].low <= address) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return nullptr;
    last_allowed = low - 1;
    return &allowed[last_allowed];
}

const TgExtent *tg_extent_above(uintptr_t address) {
    const TgExtent *below = tg_extent_at(address), *next = below ? below + 1 : allowed;
    return next < allowed + allowed_count ? next : nullptr;
}
