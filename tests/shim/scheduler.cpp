// Runs the threads of one block as fibres of one OS thread.
// A fibre that ends without ever waiting goes on with the next thread, so kernels without barriers are plain loops.
#include "state.h"

#include "fibre.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

TgState tg;

extern "C" {
// In a section of their own, so that the checks know these reads at once.
#define TG_COORDINATES __attribute__((section("tg_coordinates"), visibility("default"))) TgCoordinates
TG_COORDINATES threadIdx = {}, blockIdx = {}, blockDim = {}, gridDim = {};
alignas(4096) unsigned char tg_dynamic_shared[TG_MAX_SHARED];
}

// ---- fibres ----

struct TgFibre {
    void *stack_pointer;
    char *stack;
    TgFibre *next;
};

static TgFibre fibres[TG_MAX_THREADS];
static unsigned fibre_count;
static TgFibre *free_fibres;
static void *scheduler_pointer;

static void fibre_main();

static void rewind_fibre(TgFibre *fibre) {
    fibre->stack_pointer = first_frame(fibre->stack + GUARD_BYTES + STACK_BYTES, fibre_main);
    fibre->next = free_fibres;
    free_fibres = fibre;
}

static bool more_fibres() {
    TgFibre *fibre = &fibres[fibre_count];
    void *memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    fibre->stack = static_cast<char *>(memory);
    mprotect(memory, GUARD_BYTES, PROT_NONE);
    fibre_count++;
    rewind_fibre(fibre);
    return true;
}

// ---- the threads of one block ----

static unsigned begun, exited;
static unsigned ready[TG_MAX_THREADS], ready_head, ready_count;
static TgFibre *running;

static struct {
    unsigned arrived;
    unsigned waiting[TG_MAX_THREADS];
    int vote, sum;
    const char *file;
    int line;
} barrier;

static void wake(unsigned thread) {
    tg.thread[thread].status = TG_READY;
    ready[(ready_head + ready_count++) % TG_MAX_THREADS] = thread;
}

static void become(unsigned thread) {
    tg.current = thread;
    threadIdx = tg.thread[thread].at;
}

static void to_scheduler() {
    TgFibre *self = running;
    tg.in_fibre = 0;
    tg_switch(&self->stack_pointer, scheduler_pointer);
}

static void run_fibre(TgFibre *fibre) {
    running = fibre;
    tg.stack_low = reinterpret_cast<uintptr_t>(fibre->stack);
    tg.stack_high = tg.stack_low + GUARD_BYTES + STACK_BYTES;
    tg.in_fibre = 1;
    tg_switch(&scheduler_pointer, fibre->stack_pointer);
    tg.in_fibre = 0;
}

static void fibre_main() {
    for (;;) {
        while (begun < tg.threads && ready_count == 0) {
            unsigned thread = tg.order[begun++];
            become(thread);
            tg.thread[thread].fibre = running;
            tg.launch->kernel->run(tg.arguments);
            tg.thread[tg.current].status = TG_EXITED;
            exited++;
        }
        running->next = free_fibres;
        free_fibres = running;
        to_scheduler();
    }
}

// The fibre waits until someone wakes its thread.
static void park(TgStatus status, const char *file, int line) {
    TgThread &self = tg.thread[tg.current];
    self.status = status;
    self.file = file;
    self.line = line;
    to_scheduler();
}

// ---- faults ----

static int append(char *text, size_t size, int used, const char *format, ...) __attribute__((format(printf, 4, 5)));
static int append(char *text, size_t size, int used, const char *format, ...) {
    if (used < 0 || static_cast<size_t>(used) >= size) return used;
    va_list list;
    va_start(list, format);
    used += vsnprintf(text + used, size - static_cast<size_t>(used), format, list);
    va_end(list);
    return used;
}

static void write_fault(bool of_a_thread, uint64_t pc, const char *format, va_list list) {
    TgLaunch &launch = *tg.launch;
    char *text = launch.fault;
    const size_t size = sizeof launch.fault;
    const TgCoordinates at = blockIdx;
    int used = append(text, size, 0, "kernel %s, block (%u,%u,%u)", launch.kernel->name, at.x, at.y, at.z);
    if (of_a_thread) used = append(text, size, used, ", thread (%u,%u,%u)", threadIdx.x, threadIdx.y, threadIdx.z);
    used = append(text, size, used, ": ");
    if (static_cast<size_t>(used) < size) vsnprintf(text + used, size - static_cast<size_t>(used), format, list);
    launch.fault_pc = pc;
    tg.faulted = 1;
}

void tg_report(unsigned thread, uint64_t pc, const char *format, ...) {
    va_list list;
    va_start(list, format);
    threadIdx = tg.thread[thread].at;
    write_fault(true, pc, format, list);
    va_end(list);
}

void tg_abandon() {
    for (;;) to_scheduler();  // which never comes back to a launch at fault
}

void tg_fault(uint64_t pc, const char *format, ...) {
    va_list list;
    va_start(list, format);
    write_fault(true, pc, format, list);
    va_end(list);
    tg_abandon();
}

void tg_block_fault(const char *format, ...) {
    va_list list;
    va_start(list, format);
    write_fault(false, 0, format, list);
    va_end(list);
}

extern "C" void tgh_trap(const char *what, const char *file, int line) {
    tg_fault(0, "%s, at %s:%d", what, file, line);
}

// By TgWarpKind.
static const char *const waits[] = {"__syncwarp", "a shuffle", "a warp vote", "a warp vote", "a product of matrices"};

static void describe_wait(char *text, size_t size, const TgThread &thread) {
    int used = append(text, size, 0, "thread (%u,%u,%u) ", thread.at.x, thread.at.y, thread.at.z);
    if (thread.status == TG_EXITED) append(text, size, used, "has exited");
    else if (thread.status == TG_AT_BARRIER)
        append(text, size, used, "waits in __syncthreads at %s:%d", thread.file, thread.line);
    else
        append(text, size, used, "waits in %s with mask 0x%08x at %s:%d",
               waits[thread.kind], thread.mask, thread.file, thread.line);
}

// Nobody can go on: say who waits for whom.
static void report_deadlock() {
    char one[300], other[300];
    for (unsigned i = 0; i < tg.threads; i++) {
        const TgThread &waiter = tg.thread[i];
        if (waiter.status != TG_AT_WARP) continue;
        unsigned first = i / TG_WARP * TG_WARP;
        describe_wait(one, sizeof one, waiter);
        for (unsigned lane = 0; lane < TG_WARP; lane++) {
            if (!(waiter.mask >> lane & 1)) continue;
            if (first + lane >= tg.threads)
                return tg_block_fault("divergent warp: %s, but the block has no lane %u in that warp", one, lane);
            const TgThread &partner = tg.thread[first + lane];
            if (partner.status == TG_AT_WARP && partner.mask == waiter.mask && partner.kind == waiter.kind) continue;
            describe_wait(other, sizeof other, partner);
            return tg_block_fault("divergent %s: %s, while %s, which the mask names",
                               partner.status == TG_AT_BARRIER ? "barrier" : "warp", one, other);
        }
    }
    const TgThread *waiter = nullptr, *missing = nullptr;
    for (unsigned i = 0; i < tg.threads; i++) (tg.thread[i].status == TG_AT_BARRIER ? waiter : missing) = &tg.thread[i];
    if (!waiter || !missing) return tg_block_fault("deadlock: no thread of the block can go on");
    describe_wait(one, sizeof one, *waiter);
    describe_wait(other, sizeof other, *missing);
    tg_block_fault("divergent barrier: %s, while %s", one, other);
}

// ---- what kernels call ----

static bool same_place(const char *file, int line, const char *other_file, int other_line) {
    return line == other_line && (file == other_file || strcmp(file, other_file) == 0);
}

extern "C" int tgh_barrier(int vote, int value, const char *file, int line) {
    const unsigned self = tg.current;
    if (barrier.arrived == 0) {
        barrier.file = file;
        barrier.line = line;
        barrier.sum = 0;
    } else if (!same_place(file, line, barrier.file, barrier.line)) {
        TgThread &other = tg.thread[barrier.waiting[0]];
        tg_fault(0, "divergent barrier: it waits in __syncthreads at %s:%d, while thread (%u,%u,%u) waits in "
                 "__syncthreads at %s:%d", file, line, other.at.x, other.at.y, other.at.z, barrier.file, barrier.line);
    }
    barrier.sum += value;
    if (barrier.arrived + 1 < tg.threads) {
        barrier.waiting[barrier.arrived++] = self;
        park(TG_AT_BARRIER, file, line);
        return tg.thread[self].vote;
    }
    const int sum = barrier.sum, threads = static_cast<int>(tg.threads);
    const int answer = vote == TGH_VOTE_AND ? sum == threads : vote == TGH_VOTE_OR ? sum != 0 : sum;
    for (unsigned i = 0; i < barrier.arrived; i++) {
        tg.thread[barrier.waiting[i]].vote = answer;
        wake(barrier.waiting[i]);
    }
    barrier.arrived = 0;
    if (tg_check_unwritten()) tg_abandon();
    tg_check_barrier();
    return answer;
}

extern "C" unsigned tgh_lane() { return tg.current % TG_WARP; }

extern "C" uint64_t tgh_warp(int kind, unsigned mask, uint64_t value, unsigned source, const char *file, int line) {
    const unsigned me = tg.current, lane = me % TG_WARP, first = me - lane;
    TgThread &self = tg.thread[me];
    TgThread *const warp = &tg.thread[first];
    if (!(mask >> lane & 1))
        tg_fault(0, "divergent warp: lane %u is not in its own mask 0x%08x, at %s:%d", lane, mask, file, line);
    self.kind = kind;
    self.mask = mask;
    self.value = value;
    self.source = source;
    // Beginning behind itself, for the next lane is most likely the one that is missing.
    for (unsigned step = 1; step < TG_WARP; step++) {
        const unsigned i = (lane + step) % TG_WARP;
        if (!(mask >> i & 1)) continue;
        if (first + i >= tg.threads || warp[i].status != TG_AT_WARP || warp[i].mask != mask || warp[i].kind != kind) {
            park(TG_AT_WARP, file, line);  // the last lane to come finds all others here
            return self.value;
        }
    }
    uint64_t given[TG_WARP], ballot = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        const unsigned i = static_cast<unsigned>(__builtin_ctz(rest));
        given[i] = warp[i].value;
        if (given[i]) ballot |= 1u << i;
    }
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        const unsigned i = static_cast<unsigned>(__builtin_ctz(rest));
        if (kind == TGH_SHUFFLE) {
            // The value of a lane outside the mask is undefined on the device: poison shows if it is used.
            const unsigned from = warp[i].source;
            warp[i].value = mask >> from & 1 ? given[from] : ~0ull;
        } else if (kind == TGH_BALLOT) {
            warp[i].value = ballot;
        } else if (kind == TGH_MATCH) {
            uint64_t equal = 0;
            for (unsigned others = mask; others; others &= others - 1) {
                const unsigned j = static_cast<unsigned>(__builtin_ctz(others));
                if (given[j] == given[i]) equal |= 1u << j;
            }
            warp[i].value = equal;
        }
        if (i != lane) wake(first + i);
    }
    if (kind == TGH_SYNCWARP) tg_check_syncwarp(first, mask);
    if (kind == TGH_PRODUCT) tg_multiply(given);
    return self.value;
}

// ---- a block ----

void tg_run_block() {
    const TgLaunch &launch = *tg.launch;
    memset(tg_dynamic_shared, 0xff, launch.shared);
    if (tg.static_high > tg.static_low)
        memset(reinterpret_cast<void *>(tg.static_low), 0xff, tg.static_high - tg.static_low);
    tg_check_block();
    begun = exited = ready_head = ready_count = 0;
    barrier.arrived = 0;
    for (unsigned i = 0; i < tg.threads; i++) tg.thread[i].status = TG_READY;
    while (!tg.faulted) {
        if (ready_count) {
            const unsigned thread = ready[ready_head];
            ready_head = (ready_head + 1) % TG_MAX_THREADS;
            ready_count--;
            become(thread);
            run_fibre(tg.thread[thread].fibre);
        } else if (begun < tg.threads) {
            if (!free_fibres && !more_fibres()) return tg_block_fault("no memory for the stacks of the threads");
            TgFibre *fibre = free_fibres;
            free_fibres = fibre->next;
            run_fibre(fibre);
        } else if (!tg_check_unwritten()) {
            if (exited == tg.threads) return;
            report_deadlock();
        }
    }
}

void tg_reset_fibres() {
    free_fibres = nullptr;
    for (unsigned i = 0; i < fibre_count; i++) rewind_fibre(&fibres[i]);
}
