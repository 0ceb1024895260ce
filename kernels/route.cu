// Which rank has the row that each index asks for, where the ranks of a group share the rows, and the
// place of the row among those that are asked of all ranks, one rank's after the other's. common.cuh
// comes before it.
//
//   STEP        COUNT, then PLACE
//   NUMBER      C type of a row's number at its rank
//   THREADS     threads per block
//
// An index means the same as in gather.cu, for buffers of as many rows as all ranks have together;
// one that selects none gets place -1, and in mode raise is reported as there. Every thread takes
// every `threads`-th index, so loads are coalesced and the grid need not depend on how many there
// are. Between COUNT and PLACE the host lets torch add up the table: rows are then in a certain
// order, rank after rank, for which nothing was sorted and no thread had to wait for another.

#define COUNT 0
#define PLACE 1

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
        // What breaks the promise of UNCHECKED is none where it is negative, else a row of the last
        // rank, which does not exist.
        const Row selected = row_of(p.indices[position], p.offsets[p.ranks]);
        const i64 row = selected.number;
        if (!selected.valid || row < 0) {
#if BOUNDS == RAISE && STEP == PLACE
            report(p.faults, p.plan, position, p.indices[position], 0, p.offsets[p.ranks]);
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
