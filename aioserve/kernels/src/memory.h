// Memory of a call, and how a call says that it found none: it returns OUT_OF_MEMORY, and what it
// wrote is worth nothing. Knows no numbers.
//
// A thread of a parallel region may not leave it by `return`: it notes the shortage, and skips the
// items that it takes. Calls made of others go on to their end, as other processes may take part.
#pragma once
#include <stdint.h>
#include <stdlib.h>

enum { DONE, OUT_OF_MEMORY };  // what kernels that need memory return

// Memory that `free` takes back, or null; never null for 0 bytes.
static inline void *take(int64_t bytes) { return malloc(bytes ? bytes : 1); }
static inline void *take_zeros(int64_t bytes) { return calloc(bytes ? bytes : 1, 1); }

// From the start of a line of the cache on.
static inline void *take_lines(int64_t bytes) {
    return aligned_alloc(64, bytes ? (bytes + 63) / 64 * 64 : 64);
}

// By any thread of a region, of which it was the status before.
static inline void note_shortage(int *status) {
    __atomic_store_n(status, OUT_OF_MEMORY, __ATOMIC_RELAXED);
}
