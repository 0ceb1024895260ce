// What the CUDA sources have in common: it comes before each of them when they are compiled.
//
//   INDEX       C type of one index
//   INDEX_SIGNED  1 where INDEX is signed
//   BOUNDS      0 raise, 1 fill, 2 clip, 3 unchecked
//
// No source uses shared memory or a barrier: compiled as C++ behind a small shim for the CUDA names,
// each runs block after block and thread after thread on a CPU (tests/cuda_host).

#define RAISE 0
#define FILL 1
#define CLIP 2
#define UNCHECKED 3

// Ring of fault records, written here, read by multigather/faults.py, which repeats these numbers.
#define FAULT_RING 64
#define FAULT_WORDS 8

typedef unsigned long long u64;
typedef long long i64;

// READ_NOW hides from the compiler where a value comes from, so that it is not read again at its next
// use. It then no longer knows of a pointer what memory it is to, and would use slower generic
// accesses, but for IS_GLOBAL. ADD_IF_NEGATIVE is an addition and two selections; as C++ it becomes
// two shifts, two ands and the addition. MOVED is a pointer moved by bytes, also to where it must not
// be used: in C++ that is an overflow, which the sanitizers report, and on a GPU a pointer made of a
// number would not be known to be one to global memory.
#ifdef __CUDACC__
#define READ_NOW(constraint, value) asm volatile("" : "+" constraint(value))
#define IS_GLOBAL(pointer) __builtin_assume(__isGlobal(pointer))
#define ADD_IF_NEGATIVE(value, more)                                            \
    asm("{ .reg .pred p; setp.lt.s64 p, %0, 0; @p add.s64 %0, %0, %1; }"        \
        : "+l"(value)                                                           \
        : "l"(more))
#define MOVED(pointer, bytes) ((pointer) + (i64)(bytes))
#else
#define READ_NOW(constraint, value)
#define IS_GLOBAL(pointer)
#define ADD_IF_NEGATIVE(value, more) value += value < 0 ? more : 0
#define MOVED(pointer, bytes) ((const char*)((u64)(pointer) + (bytes)))
#endif

// The row that an index selects. Where it is not valid the index selects none, and the number says
// nothing. In UNCHECKED nothing is checked, and in CLIP every row is valid.
struct Row {
    i64 number;
    bool valid;
};

__device__ __forceinline__ Row row_of(INDEX index, i64 rows) {
    i64 row = (i64)index;
#if BOUNDS == UNCHECKED
    return {row, true};
#elif BOUNDS == CLIP
    if (INDEX_SIGNED && row < 0) return {0, true};
    return {(u64)row < (u64)rows ? row : rows - 1, true};
#else
    if (BOUNDS == RAISE && INDEX_SIGNED) ADD_IF_NEGATIVE(row, rows);
    return {row, (u64)row < (u64)rows};
#endif
}

// Appends a record to the ring: [ticket + 1, plan, position, value, buffer, rows, is_unsigned, 0].
// faults[0] counts the faults of all time and hands out tickets, faults[1] is how many of them the
// host has taken. A record is written only where its slot is free, so the earliest faults survive;
// the stamp in word 0 follows a system-wide fence, so the host never reads half a record.
//
// The ring is pinned host memory, where an atomic operation of system scope is undefined unless the
// host takes part in the GPU's atomics, which over PCIe it does not. One of the device's scope
// suffices: only this GPU adds, and the host only reads.
__device__ __forceinline__ void report(
    u64* faults, u64 plan, i64 position, INDEX value, u64 buffer, i64 rows) {
    IS_GLOBAL(faults);
    const u64 ticket = atomicAdd(faults, 1ull);
    const u64 taken = *(volatile u64*)(faults + 1);
    if (ticket - taken >= FAULT_RING) return;
    volatile u64* record = faults + FAULT_WORDS * (1 + ticket % FAULT_RING);
    record[1] = plan;
    record[2] = (u64)position;
    record[3] = (u64)(i64)value;
    record[4] = buffer;
    record[5] = (u64)rows;
    record[6] = INDEX_SIGNED ? 0 : 1;
    record[7] = 0;
    __threadfence_system();
    record[0] = ticket + 1;
}
