// Memory that is refused to one library when a test says so. Part of check_kernels.c, and preloaded
// (LD_PRELOAD) into a process of Python, whose allocators these functions then are. Knows glibc;
// knows nothing about kernels. Under a sanitizer, which has allocators of its own, nothing is refused.
//
//     refuse(&function, 3);  // the third allocation that the library of the function asks for
//     status = function();
//     if (was_refused() != status) ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST_HELD 256

static const void *library_base;  // null: nothing is refused
static _Atomic int64_t num_left;  // allocations until the one that is refused
static int is_each;               // whether all of them are
static void *_Atomic held_places[MOST_HELD];  // what the library has, and did not free yet

static const void *base_of(const void *address) {
    Dl_info info;
    return dladdr(address, &info) ? info.dli_fbase : 0;
}

// From now on, refuse the `nth` allocation of the library that `address` is in; 0: each of them.
void refuse(const void *address, int64_t nth) {
    is_each = nth == 0;
    atomic_store(&num_left, is_each ? 1 : nth);
    library_base = base_of(address);
}

// End it. 1 if an allocation was refused, 0 if there were less; -1 if the library kept any.
int was_refused(void) {
    int is_kept = 0;
    library_base = 0;
    for (int i = 0; i < MOST_HELD; i++) is_kept |= atomic_exchange(held_places + i, NULL) != NULL;
    return is_kept ? -1 : atomic_load(&num_left) <= 0;
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static int is_to_note(const void *caller) { return library_base && base_of(caller) == library_base; }

static void *note(void *place) {
    for (int i = 0; i < MOST_HELD; i++) {
        void *none = NULL;
        if (atomic_compare_exchange_strong(held_places + i, &none, place)) break;
    }
    return place;
}

#define ALLOCATE(call)                                              \
    if (!is_to_note(__builtin_return_address(0))) return call;      \
    return atomic_fetch_sub(&num_left, 1) == 1 || is_each ? NULL : note(call)

void *malloc(size_t bytes) { ALLOCATE(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { ALLOCATE(__libc_calloc(count, bytes)); }
void *aligned_alloc(size_t step, size_t bytes) { ALLOCATE(__libc_memalign(step, bytes)); }

void free(void *place) {
    for (int i = 0; place && library_base && i < MOST_HELD; i++) {
        void *expected = place;
        if (atomic_compare_exchange_strong(held_places + i, &expected, NULL)) break;
    }
    __libc_free(place);
}
#endif
