// Which rank has the row that each index asks for, where the ranks of a group share the rows, and the
// place of the row among those that are asked of all ranks, one rank's after the other's.
//
//   STEP        COUNT, then PLACE
//   INDEX       C type of one index
//   INDEX_SIGNED  1 where INDEX is signed
//   BOUNDS      0 raise, 1 fill, 2 clip, 3 unchecked
//   NUMBER      C type of a row's number at its rank
//   THREADS     threads per block
//
// An index means the same as in gather.cu, for buffers of as many rows as all ranks have together;
// one that selects none gets place -1, and in mode raise is reported as there. Every thread takes
// every `threads`-th index, so loads are coalesced and the grid need not depend on how many there
// are. Between COUNT and PLACE the host lets torch add up the table: rows are then in a certain
// order, rank after rank, for which nothing was sorted and no thread had to wait for another.
//
// Nothing here uses shared memory or a barrier: see gather.cu for how it runs on a CPU.

#define RAISE 0
#define FILL 1
#define CLIP 2
#define UNCHECKED 3

#define COUNT 0
#define PLACE 1

#define FAULT_RING 64
#define FAULT_WORDS 8

typedef unsigned long long u64;
typedef long long i64;

struct Parameters {
    const INDEX* indices;
    i64* places;         // one for each index
    i64* table;          // [ranks][threads]: how many rows each thread asks of each rank; used up
    const i64* sums;     // of the table up to and with each element
    NUMBER* requests;    // the rows' numbers at their ranks
    i64* counts;         // [ranks]: rows asked of each rank
    i64 count;           // number of indices
    const i64* offsets;  // [ranks + 1]: first row of each rank, then the number of all rows
    i64 capacity;        // places for each rank's rows, or -1 for as many as it is asked for
    i64* missed;         // with a capacity: rows that found no place are added here
    u64* faults;
    u64 plan;
    unsigned ranks;
    unsigned threads;    // of the grid
};

#if BOUNDS == RAISE && STEP == PLACE
// As in gather.cu.
__device__ __noinline__ void report(const Parameters& p, i64 position) {
    const u64 ticket = atomicAdd_system(p.faults, 1ull);
    const u64 taken = *(volatile u64*)(p.faults + 1);
    if (ticket - taken >= FAULT_RING) return;
    volatile u64* record = p.faults + FAULT_WORDS * (1 + ticket % FAULT_RING);
    record[1] = p.plan;
    record[2] = (u64)position;
    record[3] = (u64)(i64)p.indices[position];
    record[4] = 0;
    record[5] = (u64)p.offsets[p.ranks];
    record[6] = INDEX_SIGNED ? 0 : 1;
    record[7] = 0;
    __threadfence_system();
    record[0] = ticket + 1;
}
#endif

// The row that an index selects, or -1 for none. What breaks the promise of UNCHECKED is none where it
// is negative, else a row of the last rank, which does not exist.
__device__ __forceinline__ i64 row_of(const Parameters& p, INDEX index) {
    i64 row = (i64)index;
#if BOUNDS == CLIP
    const i64 rows = p.offsets[p.ranks];
    if (INDEX_SIGNED && row < 0) return 0;
    return (u64)row < (u64)rows ? row : rows - 1;
#elif BOUNDS != UNCHECKED
    const i64 rows = p.offsets[p.ranks];
    if (BOUNDS == RAISE && INDEX_SIGNED && row < 0) row += rows;
    if ((u64)row >= (u64)rows) return -1;
#endif
    return row;
}

// The rank that has a row: the last one that begins at or before it. Ranks without rows begin where
// the next one does, so none of them is found.
__device__ __forceinline__ unsigned rank_of(const Parameters& p, i64 row) {
    unsigned low = 0, high = p.ranks;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (p.offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) route(const __grid_constant__ Parameters p) {
    const unsigned thread = blockIdx.x * THREADS + threadIdx.x;
#if STEP == COUNT
    for (unsigned rank = 0; rank < p.ranks; rank++) p.table[(u64)rank * p.threads + thread] = 0;
#endif
    for (i64 position = thread; position < p.count; position += p.threads) {
        const i64 row = row_of(p, p.indices[position]);
        if (row < 0) {
#if BOUNDS == RAISE && STEP == PLACE
            report(p, position);
#endif
#if STEP == PLACE
            p.places[position] = -1;
#endif
            continue;
        }
        const unsigned rank = rank_of(p, row);
        const u64 cell = (u64)rank * p.threads + thread;
#if STEP == COUNT
        p.table[cell]++;
#else
        // A thread's rows of a rank follow one another: those before them are in the sum, and what
        // is left in the table are this one and those behind it.
        const i64 before = p.sums[cell] - p.table[cell]--;
        i64 place = before;
        if (p.capacity >= 0) {
            const i64 within = before - (rank ? p.sums[(u64)rank * p.threads - 1] : 0);
            place = within < p.capacity ? rank * p.capacity + within : -1;
        }
        if (place >= 0) p.requests[place] = (NUMBER)(row - p.offsets[rank]);
        p.places[position] = place;
#endif
    }
#if STEP == PLACE
    for (unsigned rank = thread; rank < p.ranks; rank += p.threads) {
        const i64 start = rank ? p.sums[(u64)rank * p.threads - 1] : 0;
        p.counts[rank] = p.sums[(u64)(rank + 1) * p.threads - 1] - start;
    }
    if (p.capacity >= 0) {
        // Places that nobody asked for ask for no row.
        const i64 places = p.ranks * p.capacity;
        for (i64 place = thread; place < places; place += p.threads) {
            const i64 rank = place / p.capacity;
            const i64 start = rank ? p.sums[rank * p.threads - 1] : 0;
            const i64 asked = p.sums[(rank + 1) * p.threads - 1] - start;
            if (place - rank * p.capacity >= asked) p.requests[place] = (NUMBER)-1;
            if (place == rank * p.capacity && asked > p.capacity)
                atomicAdd((u64*)p.missed, (u64)(asked - p.capacity));
        }
    }
#endif
}
