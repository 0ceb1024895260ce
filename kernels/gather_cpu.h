/* Rows of many buffers by one index on a CPU: what gather_cpu.c does and with what. */

#ifndef MULTIGATHER_GATHER_CPU_H
#define MULTIGATHER_GATHER_CPU_H

#include <stdint.h>

/* The bounds modes, numbered as in multigather/request.py. */
enum { BOUNDS_RAISE, BOUNDS_FILL, BOUNDS_CLIP, BOUNDS_UNCHECKED };

/* Types of indices: log2 of their bytes, plus 4 if unsigned. */
enum { INDEX_INT64 = 3, INDEX_UNSIGNED = 4 };

/* Layout of one buffer and its output; sizes and strides in bytes. */
struct GatherField {
    int64_t rows, row_bytes, source_stride, destination_stride;
};

struct GatherCall {
    const void *indices;
    int64_t count;
    int64_t index_stride; /* in indices */
    int index_type;
    int bounds;
    int64_t fields;
    const struct GatherField *field;
    const uint64_t *source, *destination; /* an address for each field */
};

/* Copy the rows. Returns 0, or 1 if an index is out of range in mode "raise"; nothing is written
   then. */
int gather_cpu(const struct GatherCall *call);

/* A call in one block of memory, as a launch keeps it: this, then `fields` structures, then as many
   addresses of buffers, then as many of outputs. */
struct GatherBlock {
    uint64_t indices;
    int64_t count, index_stride, index_type, bounds, fields;
};

/* As the CUDA driver's cuLaunchKernel, whose signature it has: gathers by the block that is the only
   parameter, at once, and looks at nothing else. Returns what `gather_cpu` returns. */
int gather_cpu_launch(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void *, void **parameters, void **);

/* Use threads: OpenMP's GOMP_parallel and omp_get_thread_num, and a function that says how many
   threads are wanted now. Until then, and if one is NULL, there is one thread. */
void gather_cpu_threads(void (*parallel)(void (*)(void *), void *, unsigned, unsigned),
                        int (*thread_number)(void), int (*wanted)(void));

#endif
