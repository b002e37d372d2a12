// Runs a launch on the CPU: its blocks one after another, in the order asked for.
#include "state.h"

#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

extern "C" void *__tls_get_addr(void *);

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;

struct ModuleSearch {
    uintptr_t address;
    TgModule *found;
};

extern "C" int tg_describe(const TgKernel *kernel, TgModule *module) {
    *module = TgModule();
    ModuleSearch search = {reinterpret_cast<uintptr_t>(kernel), module};
    return dl_iterate_phdr([](struct dl_phdr_info *info, size_t, void *data) {
        ModuleSearch *search = static_cast<ModuleSearch *>(data);
        uint64_t low = ~0ull, high = 0, tls = 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
            const auto &header = info->dlpi_phdr[i];
            if (header.p_type == PT_TLS) tls = header.p_memsz;
            if (header.p_type != PT_LOAD) continue;
            const uint64_t start = info->dlpi_addr + header.p_vaddr;
            if (start < low) low = start;
            if (start + header.p_memsz > high) high = start + header.p_memsz;
        }
        if (search->address < low || search->address >= high) return 0;
        *search->found = {info->dlpi_tls_modid, tls, low, high};
        return 1;
    }, &search);
}

static uint64_t random_state;
static uint64_t next_random() {  // splitmix64
    uint64_t z = random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

template <class T> static void arrange(T *list, uint64_t count, uint32_t order) {
    for (uint64_t i = 0; i < count; i++) list[i] = static_cast<T>(order == 1 ? count - 1 - i : i);
    for (uint64_t i = count; order == 2 && i > 1; i--) {
        const uint64_t j = next_random() % i;
        const T kept = list[i - 1];
        list[i - 1] = list[j];
        list[j] = kept;
    }
}

static void run_grid() {
    TgLaunch &launch = *tg.launch;
    static uint64_t *block_order;
    static uint64_t block_room;
    tg.block_count = static_cast<uint64_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    tg.threads = launch.block[0] * launch.block[1] * launch.block[2];
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    blockIdx = {0, 0, 0};
    if (launch.order && block_room < tg.block_count) {
        void *memory = realloc(block_order, tg.block_count * sizeof *block_order);
        if (!memory) return tg_block_fault("no memory to put the grid's blocks in order");
        block_order = static_cast<uint64_t *>(memory);
        block_room = tg.block_count;
    }
    random_state = launch.seed;
    if (launch.order) arrange(block_order, tg.block_count, launch.order);
    arrange(tg.order, tg.threads, launch.order);
    for (unsigned i = 0; i < tg.threads; i++)
        tg.thread[i].at = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    alignas(16) static unsigned char values[8192];
    unsigned offset = 0;
    for (int i = 0; i < launch.kernel->count; i++) {
        const unsigned room = (launch.kernel->sizes[i] + 15) / 16 * 16;
        if (offset + room > sizeof values || i >= 512) return tg_block_fault("too many bytes of tg.arguments");
        memcpy(values + offset, launch.args + offset, launch.kernel->sizes[i]);
        tg.arguments[i] = values + offset;
        offset += room;
    }
    tg.static_low = tg.static_high = 0;
    if (launch.module->tls_size) {
        struct { unsigned long module, offset; } index = {launch.module->tls_module, 0};

        tg.static_low = reinterpret_cast<uintptr_t>(__tls_get_addr(&index));
        tg.static_high = tg.static_low + launch.module->tls_size;
    }
    tg_check_launch();
    for (uint64_t i = 0; i < tg.block_count && !tg.faulted; i++) {
        tg.block = launch.order ? block_order[i] : i;
        blockIdx.x = static_cast<unsigned>(tg.block % launch.grid[0]);
        blockIdx.y = static_cast<unsigned>(tg.block / launch.grid[0] % launch.grid[1]);
        blockIdx.z = static_cast<unsigned>(tg.block / launch.grid[0] / launch.grid[1]);
        tg_run_block();
    }
}

extern "C" int tg_launch(TgLaunch *launch) {
    pthread_mutex_lock(&launch_lock);
    tg.os_thread = pthread_self();
    tg.launch = launch;
    launch->fault[0] = 0;
    launch->fault_pc = 0;
    tg.faulted = 0;
    tg_catch_signals();
    tg_start_clock(launch->seconds);
    run_grid();
    tg_set_clock(0);
    const int result = tg.faulted;
    if (tg.faulted) tg_reset_fibres();
    pthread_mutex_unlock(&launch_lock);
    return result;
}
