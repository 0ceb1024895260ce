/* The gather on a CPU, compiled when the package is installed.

   What it has over an indexing operation per buffer: rows are asked for before they are needed, one
   check of the indices serves all buffers, and one division into threads too. */

#include "gather_cpu.h"

#include <stddef.h>
#include <string.h>

enum {
    /* Indices that are resolved at a time. */
    CHUNK = 512,
    /* Rows of a slab of which one field is copied, then the next. So few stay in the L1, and the
       translations of their addresses too; 64 and 1024 were 5 and 20 % slower (10^6 random rows of
       10^7, six fields in 32 bytes, AMD EPYC). */
    SLAB_ROWS = 256,
    LINE = 64,
    /* Rows ahead that are asked for, where rows are narrow: 16 misses overlap, as many as a core
       can have under way. Where they are wide, bytes ahead, and the most of a row: the hardware's
       own prefetcher follows from there. Rows of 64 and 512 bytes out of 16 to 256 MB then take 0.5
       to 0.7 of the time (AMD EPYC, one thread), rows of 8 KiB 0.95 to 1. */
    ROWS_AHEAD = 16,
    BYTES_AHEAD = 2048,
    BYTES_ASKED = 1024,
    /* Bytes of a table that caches hold anyway: asking would only cost. */
    CACHED_TABLE = 1 << 20,
    /* Bytes that are worth another thread, which takes microseconds to wake. */
    BYTES_PER_THREAD = 1 << 17,
};

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*wanted_threads)(void);

void gather_cpu_threads(void (*start)(void (*)(void *), void *, unsigned, unsigned),
                        int (*number)(void), int (*wanted)(void))
{
    parallel = start;
    thread_number = number;
    wanted_threads = wanted;
}

/* ---- indices ------------------------------------------------------------------------------- */

#define READ(type)                                                           \
    for (int64_t k = 0; k < count; k++)                                      \
        values[k] = (int64_t)((const type *)call->indices)[(start + k) * stride]

/* Indices start .. start + count - 1 as 64-bit integers; those that are too large for it become
   the largest, which is no row of any buffer. */
static void read_indices(const struct GatherCall *call, int64_t start, int64_t count,
                         int64_t *values)
{
    const int64_t stride = call->index_stride;
    switch (call->index_type) {
    case 0: READ(int8_t); break;
    case 1: READ(int16_t); break;
    case 2: READ(int32_t); break;
    case 3: READ(int64_t); break;
    case INDEX_UNSIGNED + 0: READ(uint8_t); break;
    case INDEX_UNSIGNED + 1: READ(uint16_t); break;
    case INDEX_UNSIGNED + 2: READ(uint32_t); break;
    default:
        READ(int64_t);
        for (int64_t k = 0; k < count; k++)
            if (values[k] < 0)
                values[k] = INT64_MAX;
    }
}

/* Whether indices are all in 0 .. rows - 1, else whether all are in -rows .. rows - 1. */
enum { ALL_ROWS, SOME_NEGATIVE, SOME_OUTSIDE };

static int range_of(const struct GatherCall *call, int64_t rows)
{
    int64_t chunk[CHUNK];
    uint64_t outside = 0, negative = 0;
    if (call->index_type == INDEX_INT64 && call->index_stride == 1) {
        /* Mostly all are row numbers. Then neither an index nor its distance from the last row has a
           sign, which vector units find out without comparing. */
        const uint64_t *indices = call->indices, last = (uint64_t)rows - 1;
        uint64_t signs = 0;
        for (int64_t k = 0; k < call->count; k++)
            signs |= indices[k] | (last - indices[k]);
        if (!(signs >> 63))
            return ALL_ROWS;
    }
    for (int64_t start = 0; start < call->count; start += CHUNK) {
        const int64_t count = call->count - start < CHUNK ? call->count - start : CHUNK;
        read_indices(call, start, count, chunk);
        for (int64_t k = 0; k < count; k++) {
            negative |= (uint64_t)chunk[k] >> 63;
            /* Shifted by `rows`, both ranges together are one; no overflow where it matters. */
            outside |= (uint64_t)chunk[k] + (uint64_t)rows >= 2 * (uint64_t)rows;
        }
    }
    return outside ? SOME_OUTSIDE : negative ? SOME_NEGATIVE : ALL_ROWS;
}

/* Indices of a buffer as row numbers, -1 for a row of zeros. */
static void resolve(int bounds, int64_t rows, int64_t count, const int64_t *values, int64_t *row)
{
    for (int64_t k = 0; k < count; k++) {
        int64_t value = values[k];
        if (bounds == BOUNDS_CLIP)
            value = value < 0 ? 0 : value < rows ? value : rows - 1;
        else if (bounds == BOUNDS_RAISE)
            value += value < 0 ? rows : 0;
        else if (bounds == BOUNDS_FILL && (uint64_t)value >= (uint64_t)rows)
            value = -1;
        row[k] = value;
    }
}

/* ---- rows ---------------------------------------------------------------------------------- */

#if defined(__GNUC__)
#define INLINED inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address, 0, 0)
#else
#define INLINED inline
#define PREFETCH(address) ((void)(address))
#endif

static inline void ask_for(const char *start, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE)
        PREFETCH(start + at);
}

/* Copy `count` rows to consecutive rows of the output. Inlined for a constant `row_bytes`, a copy
   is one load and one store; `zeros`: whether a row may be -1; `asked`: bytes to ask for ahead. */
static INLINED void
copy_rows_of(const struct GatherField *field, const char *source, char *destination,
             const int64_t *row, int64_t count, int64_t row_bytes, int zeros, int64_t asked,
             int64_t ahead)
{
    const int64_t source_stride = field->source_stride;
    const int64_t destination_stride = field->destination_stride;
    /* Two loops, so that the first has no question whether there is a row ahead. */
    const int64_t asking = asked && count > ahead ? count - ahead : 0;
    for (int64_t part = 0, k = 0; part < 2; part++) {
        for (const int64_t end = part ? count : asking; k < end; k++) {
            if (!part && (!zeros || row[k + ahead] >= 0))
                ask_for(source + row[k + ahead] * source_stride, asked);
            char *to = destination + k * destination_stride;
            if (zeros && row[k] < 0)
                memset(to, 0, (size_t)row_bytes);
            else
                memcpy(to, source + row[k] * source_stride, (size_t)row_bytes);
        }
    }
}

#define COPY(bytes)                                                                            \
    (large ? copy_rows_of(field, source, destination, row, count, bytes, zeros, 1, ROWS_AHEAD) \
           : copy_rows_of(field, source, destination, row, count, bytes, zeros, 0, 0))

static INLINED void
copy_rows_any(const struct GatherField *field, const char *source, char *destination,
              const int64_t *row, int64_t count, int zeros)
{
    const int64_t bytes = field->row_bytes;
    const int large = field->rows * field->source_stride > CACHED_TABLE;
    switch (bytes) {
    case 0: break;
    case 1: COPY(1); break;
    case 2: COPY(2); break;
    case 4: COPY(4); break;
    case 8: COPY(8); break;
    case 12: COPY(12); break;
    case 16: COPY(16); break;
    default: {
        int64_t ahead = BYTES_AHEAD / bytes;
        ahead = ahead < 1 ? 1 : ahead < ROWS_AHEAD ? ahead : ROWS_AHEAD;
        copy_rows_of(field, source, destination, row, count, bytes, zeros,
                     !large ? 0 : bytes < BYTES_ASKED ? bytes : BYTES_ASKED, ahead);
    }
    }
}

static void copy_rows(const struct GatherField *field, const char *source, char *destination,
                      const int64_t *row, int64_t count)
{
    copy_rows_any(field, source, destination, row, count, 0);
}

static void copy_rows_or_zeros(const struct GatherField *field, const char *source,
                               char *destination, const int64_t *row, int64_t count)
{
    copy_rows_any(field, source, destination, row, count, 1);
}

/* ---- the call ------------------------------------------------------------------------------ */

struct Work {
    const struct GatherCall *call;
    int64_t threads;
    int as_they_are; /* whether the indices are row numbers of every buffer, in the memory they are */
};

/* How many fields from `first` on are, as far as their layout says, parts of the same rows: their
   rows have one stride and gaps for one another. */
static int64_t slab_from(const struct GatherCall *call, int64_t first)
{
    const struct GatherField *one = call->field + first;
    int64_t end = first + 1, bytes = one->row_bytes;
    while (end < call->fields && call->field[end].rows == one->rows &&
           call->field[end].source_stride == one->source_stride &&
           bytes + call->field[end].row_bytes <= one->source_stride)
        bytes += call->field[end++].row_bytes;
    return end - first;
}

static void copy_part(const struct Work *work, int64_t start, int64_t end)
{
    const struct GatherCall *call = work->call;
    const int zeros = call->bounds == BOUNDS_FILL;
    int64_t values[CHUNK], resolved[CHUNK];
    for (int64_t first = 0, members; first < call->fields; first += members) {
        members = slab_from(call, first);
        /* One buffer after another: its pages and its part of the caches are not shared then. */
        const int64_t most = work->as_they_are ? end - start : CHUNK;
        const int64_t step = members == 1 ? most : SLAB_ROWS;
        for (int64_t at = start; at < end; at += step) {
            const int64_t count = end - at < step ? end - at : step;
            const int64_t *row = (const int64_t *)call->indices + at;
            if (!work->as_they_are) {
                read_indices(call, at, count, values);
                resolve(call->bounds, call->field[first].rows, count, values, resolved);
                row = resolved;
            }
            for (int64_t k = first; k < first + members; k++) {
                const struct GatherField *field = call->field + k;
                const char *source = (const char *)(uintptr_t)call->source[k];
                char *destination =
                    (char *)(uintptr_t)call->destination[k] + at * field->destination_stride;
                (zeros && !work->as_they_are ? copy_rows_or_zeros : copy_rows)(
                    field, source, destination, row, count);
            }
        }
    }
}

static void copy_share(void *argument)
{
    const struct Work *work = argument;
    const int64_t count = work->call->count, number = thread_number();
    copy_part(work, count * number / work->threads, count * (number + 1) / work->threads);
}

int gather_cpu(const struct GatherCall *call)
{
    struct Work work = {call, 1, 0};
    int64_t rows = INT64_MAX / 2, bytes = 0;
    for (int64_t k = 0; k < call->fields; k++) {
        if (call->field[k].rows < rows)
            rows = call->field[k].rows;
        bytes += call->field[k].row_bytes;
    }
    if (call->count == 0)
        return 0;
    work.as_they_are = call->index_type == INDEX_INT64 && call->index_stride == 1;
    if (call->bounds != BOUNDS_UNCHECKED) {
        const int range = range_of(call, rows);
        if (range == SOME_OUTSIDE && call->bounds == BOUNDS_RAISE)
            return 1;
        work.as_they_are &= range == ALL_ROWS;
    }
    if (parallel != NULL && thread_number != NULL && wanted_threads != NULL) {
        const int64_t most = call->count * bytes / BYTES_PER_THREAD, wanted = wanted_threads();
        work.threads = most < wanted ? most : wanted;
        work.threads = work.threads < call->count ? work.threads : call->count;
    }
    if (work.threads > 1)
        parallel(copy_share, &work, (unsigned)work.threads, 0);
    else
        copy_part(&work, 0, call->count);
    return 0;
}

int gather_cpu_launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                      unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                      void *stream, void **parameters, void **extra)
{
    (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y;
    (void)block_z, (void)shared_bytes, (void)stream, (void)extra;
    const struct GatherBlock *block = parameters[0];
    const struct GatherField *field = (const struct GatherField *)(block + 1);
    const uint64_t *addresses = (const uint64_t *)(field + block->fields);
    const struct GatherCall call = {(const void *)(uintptr_t)block->indices,
                                    block->count,
                                    block->index_stride,
                                    (int)block->index_type,
                                    (int)block->bounds,
                                    block->fields,
                                    field,
                                    addresses,
                                    addresses + block->fields};
    return gather_cpu(&call);
}
