// SPDX-License-Identifier: Apache-2.0
// An LD_PRELOAD heap for tests: while guarded, what posix_memalign returns (every tensor of torch)
// ends where a page that faults begins, and freed memory faults.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define ARENA ((size_t)1 << 36)

static char* arena;
static char* next;
static int guarded;

void guard_heap(int on) {
  if (arena == NULL) {
    arena = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) abort();
    next = arena;
  }
  guarded = on;
}

int posix_memalign(void** result, size_t alignment, size_t size) {
  static int (*real)(void**, size_t, size_t);
  if (!guarded) {
    if (real == NULL) real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    return real(result, alignment, size);
  }
  const size_t bytes = (size + PAGE - 1) / PAGE * PAGE;
  char* pages = __atomic_fetch_add(&next, bytes + PAGE, __ATOMIC_RELAXED);
  if (mprotect(pages, bytes, PROT_READ | PROT_WRITE) != 0) abort();
  *result = pages + bytes - size;  // at any alignment
  return 0;
}

void free(void* p) {
  static void (*real)(void*);
  if (arena != NULL && (char*)p >= arena && (char*)p < arena + ARENA) {
    char* page = (char*)((uintptr_t)p / PAGE * PAGE);
    // The block ends at the next guard page, but how far that is was not kept: its first page.
    madvise(page, PAGE, MADV_DONTNEED);
    mprotect(page, PAGE, PROT_NONE);
    return;
  }
  if (real == NULL) real = (void (*)(void*))dlsym(RTLD_NEXT, "free");
  real(p);
}
