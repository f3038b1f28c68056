// Which instructions this CPU offers, asked of the CPU itself. /proc/cpuinfo is no substitute: in
// an emulated process it describes the machine around the emulator. Knows no kernels.
#include <stdint.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <unistd.h>

#define AVX 0x6     // registers that the operating system must save, as bits of XCR0
#define AVX512 0xe6
#define AMX 0x60000
#define ARCH_PRCTL 158  // to ask for the large ones of AMX: each process has to, once
#define REQUEST_REGISTERS 0x1023
#define AMX_TILES 18

enum { EAX, EBX, ECX, EDX };

// Names as in /proc/cpuinfo.
static const struct {
    const char *name;
    unsigned leaf, subleaf, in, bit, saved;
} FEATURES[] = {
    {"fma", 1, 0, ECX, 12, AVX},
    {"f16c", 1, 0, ECX, 29, AVX},
    {"avx2", 7, 0, EBX, 5, AVX},
    {"avx512f", 7, 0, EBX, 16, AVX512},
    {"avx512dq", 7, 0, EBX, 17, AVX512},
    {"avx512bw", 7, 0, EBX, 30, AVX512},
    {"avx512vl", 7, 0, EBX, 31, AVX512},
    {"avx512_vnni", 7, 0, ECX, 11, AVX512},
    {"avx512_bf16", 7, 1, EAX, 5, AVX512},
    {"avx_vnni", 7, 1, EAX, 4, AVX},
    {"avx512_fp16", 7, 0, EDX, 23, AVX512},
    {"amx_bf16", 7, 0, EDX, 22, AMX},
    {"amx_int8", 7, 0, EDX, 25, AMX},
};

static uint32_t saved_registers(void) {
    uint32_t found[4], low, high;
    if (!__get_cpuid(1, &found[EAX], &found[EBX], &found[ECX], &found[EDX])) return 0;
    if (!(found[ECX] >> 27 & 1)) return 0;  // no XGETBV
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// The name of feature `index` if this CPU has it, "" if it has not, null beyond the last.
const char *cpu_feature(int64_t index) {
    if (index < 0 || index >= (int64_t)(sizeof FEATURES / sizeof *FEATURES)) return 0;
    uint32_t found[4] = {0}, saved = FEATURES[index].saved;
    int is_known = __get_cpuid_count(FEATURES[index].leaf, FEATURES[index].subleaf, &found[EAX],
                                     &found[EBX], &found[ECX], &found[EDX]);
    int has = is_known && found[FEATURES[index].in] >> FEATURES[index].bit & 1;
    has = has && (saved_registers() & saved) == saved;
    if (has && saved == AMX) has = !syscall(ARCH_PRCTL, REQUEST_REGISTERS, AMX_TILES);
    return has ? FEATURES[index].name : "";
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

const char *cpu_feature(int64_t index) {
    if (index == 0) return getauxval(AT_HWCAP2) >> 14 & 1 ? "bf16" : "";
    return 0;
}

#else

const char *cpu_feature(int64_t index) { return 0; }

#endif
