// A wild pointer, a division by zero or an endless loop ends the launch, not the process.
#include "state.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
enum { SIGNAL_COUNT = 4 };
static struct sigaction previous[SIGNAL_COUNT];

static uint64_t pc_of(void *context) {
#if defined(__x86_64__)
    return static_cast<uint64_t>(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return static_cast<ucontext_t *>(context)->uc_mcontext.pc;
#else
    return 0;
#endif
}

static void on_signal(int number, siginfo_t *info, void *context) {
    if (!tg.in_fibre || !pthread_equal(pthread_self(), tg.os_thread)) {
        // Not the kernel's: the handler that was there before sees it when the instruction runs again.
        for (int i = 0; i < SIGNAL_COUNT; i++)
            if (SIGNALS[i] == number) sigaction(number, &previous[i], nullptr);
        return;
    }
    const uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
    const uint64_t pc = pc_of(context);
    if (number == SIGFPE) tg_fault(pc, "integer division by zero, or its result does not fit");
    if (number == SIGILL) tg_fault(pc, "illegal instruction");
    if (address >= tg.stack_low && address < tg.stack_low + GUARD_BYTES)
        tg_fault(pc, "stack overflow: a thread has %zu bytes", STACK_BYTES);
    tg_fault(pc, "out of bounds: no memory at %#zx", static_cast<size_t>(address));
}

static void on_clock(int, siginfo_t *, void *context) {
    if (tg.in_fibre && !tg.allocating && pthread_equal(pthread_self(), tg.os_thread))
        tg_fault(pc_of(context), "hang: still running after %g seconds of processor time", tg.launch->seconds);
}

// Handlers, the stack they run on and the clock stay once they are there: system calls are most of a small launch.
void tg_catch_signals() {
    static __thread char *handler_stack;
    struct sigaction action = {};
    if (!handler_stack) {
        const size_t size = 64 << 10;
        stack_t own = {};
        sigaltstack(nullptr, &own);
        if ((own.ss_flags & SS_DISABLE) || own.ss_size < size) {
            own = stack_t();
            own.ss_sp = malloc(size);
            own.ss_size = size;
            sigaltstack(&own, nullptr);
        }
        handler_stack = static_cast<char *>(own.ss_sp);
    }
    sigaction(SIGSEGV, nullptr, &action);
    if (action.sa_sigaction == on_signal) return;
    action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // a handler is left by switching stacks
    action.sa_sigaction = on_signal;
    for (int i = 0; i < SIGNAL_COUNT; i++) {
        struct sigaction before;
        sigaction(SIGNALS[i], &action, &before);
        if (before.sa_sigaction != on_signal) previous[i] = before;
    }
    action.sa_sigaction = on_clock;
    action.sa_flags |= SA_RESTART;
    sigaction(SIGRTMAX - 3, &action, nullptr);
}

static __thread timer_t clock_timer;

bool tg_set_clock(double seconds) {
    struct itimerspec span = {};
    span.it_value.tv_sec = static_cast<time_t>(seconds);
    span.it_value.tv_nsec = static_cast<long>((seconds - static_cast<double>(span.it_value.tv_sec)) * 1e9);
    if (seconds > 0) span.it_interval.tv_nsec = 50000000;  // again, should the first have met the scheduler
    return timer_settime(clock_timer, 0, &span, nullptr) == 0;
}

void tg_start_clock(double seconds) {
    static __thread pid_t owner;  // a forked process inherits no clock
    if (owner == getpid() && tg_set_clock(seconds)) return;
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGRTMAX - 3;
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
    event.sigev_notify_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &clock_timer) != 0) return;
    owner = getpid();
    tg_set_clock(seconds);
}
