// What the compiler's sanitizers call before every access to memory; these are our answers, and their libraries are
// never linked.
#include "state.h"

#define PC reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define ADDRESS reinterpret_cast<uintptr_t>(address)

static void any_access(uintptr_t address, size_t size, bool write, uint64_t pc) {
    tg_access(address, size, write, false, {pc, nullptr, 0});
}

static void aligned_access(uintptr_t address, size_t size, bool write, uint64_t pc) {
    if (address % size) {
        tg_first_unwritten();
        tg_fault(pc, "%s: it %s %zu bytes at %#zx, which is no multiple of %zu",
                 size < 8 ? "misaligned access" : "misaligned vector", write ? "writes" : "reads", size, address, size);
    }
    any_access(address, size, write, pc);
}

extern "C" {

void tgh_watch(const void *address, size_t size, int write) { any_access(ADDRESS, size, write, PC); }

#define CALLBACKS(n)                                                                                \
    void __tsan_read##n(void *address) { aligned_access(ADDRESS, n, false, PC); }                   \
    void __tsan_write##n(void *address) { aligned_access(ADDRESS, n, true, PC); }                   \
    void __tsan_volatile_read##n(void *address) { aligned_access(ADDRESS, n, false, PC); }          \
    void __tsan_volatile_write##n(void *address) { aligned_access(ADDRESS, n, true, PC); }          \
    void __tsan_unaligned_read##n(void *address) { any_access(ADDRESS, n, false, PC); }             \
    void __tsan_unaligned_write##n(void *address) { any_access(ADDRESS, n, true, PC); }             \
    void __tsan_unaligned_volatile_read##n(void *address) { any_access(ADDRESS, n, false, PC); }    \
    void __tsan_unaligned_volatile_write##n(void *address) { any_access(ADDRESS, n, true, PC); }
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)
void __tsan_read_range(void *address, size_t size) { any_access(ADDRESS, size, false, PC); }
void __tsan_write_range(void *address, size_t size) { any_access(ADDRESS, size, true, PC); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// -fsanitize=alignment asks before the optimizer splits a vector into its parts.
struct UbsanType {
    uint16_t kind, info;
    char name[];
};
struct UbsanMismatch {
    const char *file;
    uint32_t line, column;
    const UbsanType *type;
    unsigned char log_alignment, check;
};
void __ubsan_handle_type_mismatch_v1(UbsanMismatch *data, uintptr_t address) {
    const size_t alignment = static_cast<size_t>(1) << data->log_alignment;
    if (address % alignment == 0) return;
    tg_first_unwritten();
    const char *what = alignment < 8 ? "misaligned access" : "misaligned vector", *type = data->type->name;
    tg_fault(0, "%s: an access of type %s at %#zx, which is no multiple of %zu, at %s:%u", what, type, address,
             alignment, data->file, data->line);
}
}
