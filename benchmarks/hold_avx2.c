// Loaded before a program (LD_PRELOAD), hides what a CPU has beyond AVX2 from it: for libraries that ask
// the CPU itself, whatever variables say. The instruction `cpuid` then ends in a signal, whose handler
// answers without AVX-VNNI, AVX-512 and AMX. It is compiled on Linux and x86-64; on a CPU without the flag
// `cpuid_fault` the program ends at once. A program that handles SIGSEGV itself ends as well, with its
// first `cpuid`. What the C library chose before, to copy memory, stays.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static struct sigaction before;

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)regs[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {  // a fault of the program
        sigaction(number, &before, 0);
        return;
    }
    const unsigned leaf = regs[REG_RAX], part = regs[REG_RCX];
    unsigned a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && part == 0) {
        b &= ~0xdc230000u;  // AVX-512: F, DQ, IFMA, PF, ER, CD, BW, VL
        c &= ~0x5842u;      // VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
        d &= ~0x3c0010cu;   // 4VNNIW, 4FMAPS, VP2INTERSECT; AMX: BF16, TILE, INT8; FP16
    }
    if (leaf == 7 && part == 1) a &= ~0xa00030u, d = 0;  // AVX-VNNI, BF16, AMX-FP16, AVX-IFMA and later
    regs[REG_RAX] = a, regs[REG_RBX] = b, regs[REG_RCX] = c, regs[REG_RDX] = d;
    regs[REG_RIP] += 2;
}

__attribute__((constructor)) static void hold(void) {
    const struct sigaction own = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &own, &before);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        fputs("hold_avx2: this CPU cannot hide what it has\n", stderr);
        _exit(77);
    }
}
