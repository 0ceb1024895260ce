// Gather rows of many buffers with one index: destination[k][j] = source[k][indices[j]].
//
// One source file, specialised by macros when it is compiled (NVRTC through CuPy, or nvcc), with
// common.cuh before it, which explains INDEX, INDEX_SIGNED and BOUNDS:
//
//   FIELDS      capacity of the field table; entries past the fields in use start at tile 2^32 - 1
//   STARTS      room for that many first tiles, a multiple of 16
//   SEARCH_STEP the largest power of two below FIELDS (used where FIELDS > 8)
//   WIDE        1 where a field has 2^31 copy units or more, so that unit numbers need 64 bits
//   SHIFTED     1 where a field is copied shifted, which needs more registers
//   PACKED      1 where fields are copied as columns of one slab, row by row
//   RANKS       0, or the most ranks whose memory the rows of sharded buffers are in
//   THREADS     threads per block
//   UNROLL      units in flight per thread: all loads are issued before the first store
//   STREAMING   1 to load and store with evict-first hints (tables and outputs far beyond L2)
//
// The rows of a field are copied in one of two ways. Threads of a tile copy units that are numbered
// through all rows, which suits rows of a few units. Rows of a warp's width or more are copied by
// warps, a piece each: 32 lanes share the division, the index and its check (4 to 11 % faster on an
// H200 at decode and replay sizes).
//
// A field's rows are copied as bytes, in the widest unit (1 to 16 bytes) that its two pointers, its
// two row strides and its row size allow; the host chooses it per field, so one misaligned buffer
// does not slow the others down. Every row offset is a 64-bit byte offset.
//
// An H200 copies about as many units per second whatever their width, so narrow units leave most of
// its memory rate unused. Rows that allow none wider are copied shifted unless they are short: a unit
// is then an aligned 16-byte window of the destination row, put together from the two aligned 16-byte
// words that hold its bytes in the source. A word may reach into the next row of a buffer, never out
// of the buffer: windows there are copied byte by byte, and so are the ends of rows between gaps. Of
// a window that reaches past an end of its destination row, only the row's bytes are stored.
//
// Fields that lie as the columns of one slab do, a *packed group*, are copied together: a thread
// copies one row of all of them. Its first load brings the row's memory sector, and the others find
// it in L1. In tiles of their own each field would fetch that sector from memory anew. Nothing relies
// on the fields' really being in one slab: each has its own addresses and strides.

// Kinds of fields: the binary logarithm of a copy unit's bytes, 0 to 4, or one of these.
#define EMPTY_ROWS 5   // rows of no bytes, only checked
#define SHIFTED_ROWS 6 // copied in windows
#define PACKED_ROWS 7  // the first field of a packed group; the others follow it and have no tiles
#define BY_WARPS 8     // added where a warp copies one piece of one row

// Units of 8, 4, 2 and 1 bytes of different fields that a thread of a packed group has in flight.
#define PACKED_8 4
#define PACKED_4 8
#define PACKED_2 4
#define PACKED_1 4

// A launch finds its parameters in no cache, and the constant cache fetches one line of 64 bytes
// after the other. So what is read together lies together: the first tiles of 16 fields are a line,
// and a field's entry is one. With the first tiles in the entries, so that a search fetched up to
// eight of them, a gather of 256 transitions took 2.2 us in place of 1.9 (H200).
struct Field {
    const char* source;
    char* destination;
    i64 rows;                // valid indices are 0 .. rows - 1
    i64 source_stride;       // bytes from one row to the next
    i64 destination_stride;  // bytes
    unsigned parts;          // parts of a row that work is divided into: its copy units or, by warps,
                             // its pieces; where WIDE, the low half of their number
    unsigned magic;          // 32-bit division by parts: (umulhi(n, magic) + n) >> shift; where WIDE,
                             // the high half of their number
    unsigned width;          // of a row: by warps or packed its copy units, shifted its bytes (below
                             // 2^30)
    unsigned piece;          // by warps: copy units of a piece, at most 32 * UNROLL
    unsigned buffer;         // position among the caller's buffers, for error reports
    unsigned short shift;
    unsigned short kind;
};
// The first field of a packed group describes all of it. The fields follow it by the size of their
// copy units, 8, 4, 2 and 1 bytes: `piece` has the number of each, from its low byte on; `magic` is
// the number of steps that copy all fields, `shift` the most copy units that a row of one has.

struct Parameters {
    const INDEX* indices;
    i64 index_stride;  // elements from one index to the next
    i64 count;         // number of indices
    u64* faults;       // host memory mapped into the device's address space
    u64 plan;          // number that the host finds the call's description by
    u64 unused;        // with 48 bytes before it, what follows starts a line on sm_90
    unsigned first_tile[STARTS];
    Field field[FIELDS];
#if RANKS
    // Row r, which rank k has, is where row place[k] + r * steps of every source would be. Ranks
    // past those in use begin behind all rows.
    i64 steps;
    i64 first_row[RANKS];
    i64 place[RANKS];
#endif
};

// What copying one field takes, in registers. All of it is read before anything depends on it, so that
// the first reads, which miss the constant cache, overlap. On an H200 at decode sizes the time is the
// same within noise; without it, configs with unroll 4 spill 16 bytes (sm_90, CUDA 13.0).
struct Copy {
    const char* source;
    char* destination;
    i64 rows;
    i64 source_stride;
    i64 destination_stride;
    unsigned parts;
    unsigned magic;
    unsigned shift;
    unsigned kind;
    unsigned width;
    unsigned piece;
};

__device__ __forceinline__ Copy copy_of(const Parameters& p, unsigned k) {
    const Field& field = p.field[k];
    Copy copy = {field.source, field.destination, field.rows, field.source_stride,
                 field.destination_stride, field.parts, field.magic, field.shift, field.kind,
                 field.width, field.piece};
    READ_NOW("l", copy.source);
    READ_NOW("l", copy.destination);
    READ_NOW("l", copy.rows);
    READ_NOW("l", copy.source_stride);
    READ_NOW("l", copy.destination_stride);
    READ_NOW("r", copy.parts);
    READ_NOW("r", copy.magic);
    READ_NOW("r", copy.shift);
    READ_NOW("r", copy.width);
    IS_GLOBAL(copy.source);
    IS_GLOBAL(copy.destination);
    return copy;
}

// Parts of a row, and division by their number, of a field or of its copy in registers.
#if WIDE
typedef u64 Count;
template <typename Of>
__device__ __forceinline__ Count parts_of(const Of& field) {
    return (u64)field.magic << 32 | field.parts;
}
template <typename Of>
__device__ __forceinline__ Count divide(Count n, const Of& field) {
    return n / parts_of(field);
}
#else
typedef unsigned Count;
template <typename Of>
__device__ __forceinline__ Count parts_of(const Of& field) {
    return field.parts;
}
// By an invariant through a multiply and a shift (Granlund and Montgomery, PLDI 1994, figure 4.1 with
// the round-up multiplier); exact for every n below 2^31, which the host ensures.
template <typename Of>
__device__ __forceinline__ Count divide(Count n, const Of& field) {
    return (__umulhi(n, field.magic) + n) >> field.shift;
}
#endif

struct Nothing {};  // unit of a field whose rows have no bytes

template <typename Unit>
__device__ __forceinline__ Unit load(const Unit* address) {
#if STREAMING
    return __ldcs(address);
#else
    // Not __ldg: the compiler moves stores above such loads, and the loads then wait for one another.
    return *address;
#endif
}
template <typename Unit>
__device__ __forceinline__ void store(Unit* address, const Unit& value) {
#if STREAMING
    __stcs(address, value);
#else
    *address = value;
#endif
}
__device__ __forceinline__ Nothing load(const Nothing*) { return Nothing(); }
__device__ __forceinline__ void store(Nothing*, const Nothing&) {}

__device__ __forceinline__ INDEX load_index(const Parameters& p, i64 position) {
    return __ldg(p.indices + position * p.index_stride);
}

__device__ __forceinline__ void report_row(const Parameters& p, const Field& field, i64 position) {
    report(p.faults, p.plan, position, load_index(p, position), field.buffer, field.rows);
}

// Where a row is: counted from the sources' starts, which are those of all ranks' memory. In unsigned
// numbers, as below, because that of a row that is not valid may overflow.
__device__ __forceinline__ i64 placed(const Parameters& p, i64 row) {
#if RANKS
    i64 place = p.place[0];
#pragma unroll 8
    for (int k = 1; k < RANKS; k++)
        if (row >= p.first_row[k]) place = p.place[k];
    row = (i64)((u64)place + (u64)row * (u64)p.steps);
#endif
    return row;
}

// The row that an index selects among a field's, and where it is.
__device__ __forceinline__ Row row_of(const Parameters& p, INDEX index, i64 rows) {
    const Row row = row_of(index, rows);
    return {placed(p, row.number), row.valid};
}

// Addresses are computed for every lane and only the accesses are predicated: a stride that is read
// under a predicate is read after the index has arrived, and its latency adds to the load's.
template <typename Unit>
__device__ __forceinline__ const Unit* source_of(const Copy& copy, i64 row) {
    return (const Unit*)MOVED(copy.source, (u64)row * (u64)copy.source_stride);
}
template <typename Unit>
__device__ __forceinline__ Unit* destination_of(const Copy& copy, i64 position) {
    return (Unit*)(copy.destination + position * copy.destination_stride);
}

#if SHIFTED
struct Shifted {};  // unit of a field that is copied shifted

// One window of a row. Offsets count from the row's start; the first window begins before it where
// the destination's row is not aligned. Row sizes are below 2^30, so nothing here overflows.
struct Window {
    const char* source;  // start of the row
    char* destination;   // start of the row
    int offset;          // of the window's first byte
    int shift;           // bytes of the low source word that lie before the window
};

// Whether memory right before and right behind a source row belongs to the buffer: other rows of it.
struct Neighbours {
    bool before, behind;
};

__device__ __forceinline__ Window window_of(
    const Copy& copy, i64 row, i64 position, unsigned column) {
    Window window;
    window.source = source_of<char>(copy, row);
    window.destination = destination_of<char>(copy, position);
    window.offset = (int)(16 * column) - ((int)(u64)window.destination & 15);
    window.shift = (int)((u64)window.source - (u64)window.destination) & 15;
    return window;
}
__device__ __forceinline__ Neighbours neighbours_of(const Copy& copy, i64 row) {
    const bool dense = !RANKS && copy.source_stride == (i64)copy.width;
    return {dense && row > 0, dense && row < copy.rows - 1};
}

// The two aligned words that hold a window's source bytes, low and high, begin at these offsets. A
// word is needed if it holds a byte that is in both the window and the row.
__device__ __forceinline__ int low_word(const Window& window) {
    return window.offset - window.shift;
}
__device__ __forceinline__ bool needs_low(const Window& window) { return low_word(window) > -16; }
__device__ __forceinline__ bool needs_high(const Window& window, int row_bytes) {
    return window.shift && row_bytes - low_word(window) > 16;
}

// Whether the needed words lie wholly in the buffer.
__device__ __forceinline__ bool readable_as_words(
    const Window& window, int row_bytes, const Neighbours& neighbours) {
    const int first = low_word(window) + (needs_low(window) ? 0 : 16);
    const int end = low_word(window) + (needs_high(window, row_bytes) ? 32 : 16);
    return (first >= 0 || neighbours.before) && (end <= row_bytes || neighbours.behind);
}

__device__ __forceinline__ uint4 load_low(const Window& window) {
    return load((const uint4*)(window.source + low_word(window)));
}
__device__ __forceinline__ uint4 load_high(const Window& window) {
    return load((const uint4*)(window.source + low_word(window) + 16));
}

// Bytes shift .. shift + 15 of two words. By selections, since registers cannot be indexed.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int shift) {
    const bool two = shift & 8, one = shift & 4;
    const unsigned a = two ? low.z : low.x, b = two ? low.w : low.y, c = two ? high.x : low.z,
                   d = two ? high.y : low.w, e = two ? high.z : high.x, f = two ? high.w : high.y;
    const unsigned v = one ? b : a, w = one ? c : b, x = one ? d : c, y = one ? e : d,
                   z = one ? f : e;
    const unsigned bits = 8 * (shift & 3);
    return {__funnelshift_r(v, w, bits), __funnelshift_r(w, x, bits), __funnelshift_r(x, y, bits),
            __funnelshift_r(y, z, bits)};
}

// Stores those bytes of a window that belong to the row: most often all, as one word.
__device__ __forceinline__ void store_window(
    const Window& window, int row_bytes, const uint4& value) {
    char* target = window.destination + window.offset;
    if (window.offset >= 0 && window.offset + 16 <= row_bytes) {
        // If the compiler knew the address's parts, it would store the window as four words.
        READ_NOW("l", target);
        IS_GLOBAL(target);
        store((uint4*)target, value);
        return;
    }
    const unsigned parts[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int start = window.offset + 4 * part;
        if (start >= 0 && start + 4 <= row_bytes) {
            *(unsigned*)(target + 4 * part) = parts[part];
        } else {
#pragma unroll
            for (int b = 0; b < 4; b++)
                if (start + b >= 0 && start + b < row_bytes)
                    target[4 * part + b] = (char)(parts[part] >> (8 * b));
        }
    }
}

// Copies a window byte by byte: beside it may be memory outside the buffer.
__device__ __forceinline__ void copy_bytes(const Window& window, int row_bytes) {
#pragma unroll 1
    for (int b = 0; b < 16; b++) {
        const int at = window.offset + b;
        if (at >= 0 && at < row_bytes) window.destination[at] = window.source[at];
    }
}
#endif

// Copies units base, base + THREADS, ... of one field, numbered through all of its rows. Returns
// whether all rows were valid.
template <typename Unit>
__device__ __forceinline__ bool copy_tile(const Parameters& p, const Copy& copy, Count base) {
    const Count units = parts_of(copy);
    const Count total = (Count)p.count * units;
    INDEX index[UNROLL];
    Unit value[UNROLL];
    Unit* target[UNROLL];
    bool valid = true;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const Count unit = base + (Count)(u * THREADS);
        index[u] = 0;
        if (unit < total) index[u] = load_index(p, (i64)divide(unit, copy));
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const Count unit = base + (Count)(u * THREADS);
        const Count position = divide(unit, copy);
        const Count column = unit - position * units;
        // Past the last unit it is row 0, which is valid.
        const Row row = row_of(p, index[u], copy.rows);
        const Unit* from = source_of<Unit>(copy, row.number) + column;
        target[u] = destination_of<Unit>(copy, (i64)position) + column;
        valid = valid && row.valid;
        value[u] = Unit();
        if (unit < total && row.valid) value[u] = load(from);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (base + (Count)(u * THREADS) < total) store(target[u], value[u]);
    return valid;
}
#if SHIFTED
template <>
__device__ __forceinline__ bool copy_tile<Shifted>(
    const Parameters& p, const Copy& copy, Count base) {
    const Count units = parts_of(copy);
    const Count total = (Count)p.count * units;
    const int row_bytes = (int)copy.width;
    INDEX index[UNROLL];
    Window window[UNROLL];
    uint4 low[UNROLL], high[UNROLL];
    bool whole[UNROLL], read[UNROLL], valid = true;
    unsigned by_bytes = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const Count unit = base + (Count)(u * THREADS);
        index[u] = 0;
        if (unit < total) index[u] = load_index(p, (i64)divide(unit, copy));
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const Count unit = base + (Count)(u * THREADS);
        const Count position = divide(unit, copy);
        const Count column = unit - position * units;
        const Row row = row_of(p, index[u], copy.rows);
        window[u] = window_of(copy, row.number, (i64)position, (unsigned)column);
        const bool words =
            readable_as_words(window[u], row_bytes, neighbours_of(copy, row.number));
        // The last window of a row is empty where the row begins early in its first.
        const bool active = unit < total && window[u].offset < row_bytes;
        read[u] = active && row.valid && words;
        whole[u] = active && (words || !row.valid);
        if (active && !whole[u]) by_bytes |= 1u << u;
        valid = valid && row.valid;
    }
    // In a loop of its own: amid the arithmetic above, every load would stand behind a branch.
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        low[u] = high[u] = uint4();
        if (read[u] && needs_low(window[u])) low[u] = load_low(window[u]);
        if (read[u] && needs_high(window[u], row_bytes)) high[u] = load_high(window[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (whole[u])
            store_window(window[u], row_bytes, shifted(low[u], high[u], window[u].shift));
    // Only the ends of the buffer, or of every row where rows have gaps. They come last and find
    // their rows again, to hold no registers above.
    for (Count unit = base; by_bytes; unit += THREADS, by_bytes >>= 1) {
        if (!(by_bytes & 1)) continue;
        const Count position = divide(unit, copy);
        const Row row = row_of(p, load_index(p, (i64)position), copy.rows);
        const unsigned column = (unsigned)(unit - position * units);
        copy_bytes(window_of(copy, row.number, (i64)position, column), row_bytes);
    }
    return valid;
}
#endif
// Copies one piece of one row: lane by lane, 32 units apart. The warp's lanes share the division, the
// index, its check and the row's address, which a thread of a tile has for each unit anew.
template <typename Unit>
__device__ __forceinline__ bool copy_piece(const Parameters& p, const Copy& copy, Count warp) {
    const Count pieces = parts_of(copy);
    if (warp >= (Count)p.count * pieces) return true;
    const Count position = divide(warp, copy);
    const unsigned lane = threadIdx.x & 31;
    const unsigned start = (unsigned)(warp - position * pieces) * copy.piece;
    const unsigned end = min(start + copy.piece, copy.width);
    const Row row = row_of(p, load_index(p, (i64)position), copy.rows);
    const Unit* from = source_of<Unit>(copy, row.number) + start + lane;
    Unit* target = destination_of<Unit>(copy, (i64)position) + start + lane;
    Unit value[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        value[u] = Unit();
        if (start + lane + 32 * u < end && row.valid) value[u] = load(from + 32 * u);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
        if (start + lane + 32 * u < end) store(target + 32 * u, value[u]);
    return row.valid;
}
#if SHIFTED
template <>
__device__ __forceinline__ bool copy_piece<Shifted>(
    const Parameters& p, const Copy& copy, Count warp) {
    const Count pieces = parts_of(copy);
    if (warp >= (Count)p.count * pieces) return true;
    const Count position = divide(warp, copy);
    const unsigned column =
        (unsigned)(warp - position * pieces) * copy.piece + (threadIdx.x & 31);
    const int row_bytes = (int)copy.width;
    const Row row = row_of(p, load_index(p, (i64)position), copy.rows);
    const Neighbours neighbours = neighbours_of(copy, row.number);
    const Window start = window_of(copy, row.number, (i64)position, column);
    uint4 low[UNROLL], high[UNROLL];
    bool whole[UNROLL];
    unsigned by_bytes = 0;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        Window window = start;
        window.offset += 16 * 32 * u;
        const bool words = readable_as_words(window, row_bytes, neighbours);
        const bool active = 32 * u < (int)copy.piece && window.offset < row_bytes;
        const bool read = active && row.valid && words;
        whole[u] = active && (words || !row.valid);
        if (active && !whole[u]) by_bytes |= 1u << u;
        low[u] = high[u] = uint4();
        if (read && needs_low(window)) low[u] = load_low(window);
        if (read && needs_high(window, row_bytes)) high[u] = load_high(window);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        Window window = start;
        window.offset += 16 * 32 * u;
        if (whole[u]) store_window(window, row_bytes, shifted(low[u], high[u], start.shift));
    }
    for (Window window = start; by_bytes; window.offset += 16 * 32, by_bytes >>= 1)
        if (by_bytes & 1) copy_bytes(window, row_bytes);
    return row.valid;
}
#endif

#if PACKED
// Loads unit number `column` of a row of fields first .. end - 1, at most MOST. Not with the
// evict-first hint: what the sector holds for other fields must stay in L1 until they are loaded.
template <typename Unit, int MOST>
__device__ __forceinline__ void load_column(
    Unit (&value)[MOST], const Parameters& p, unsigned first, unsigned end, unsigned column, i64 row,
    bool reads) {
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        value[j] = Unit();
        if (first + j >= end) continue;
        const Field& field = p.field[first + j];
        const char* from = field.source + row * field.source_stride;
        IS_GLOBAL(from);
        if (column < field.width && reads) value[j] = ((const Unit*)from)[column];
    }
}
template <typename Unit, int MOST>
__device__ __forceinline__ void store_column(
    const Unit (&value)[MOST], const Parameters& p, unsigned first, unsigned end, unsigned column,
    i64 position) {
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        if (first + j >= end) continue;
        const Field& field = p.field[first + j];
        char* target = field.destination + position * field.destination_stride;
        IS_GLOBAL(target);
        if (column < field.width) store((Unit*)target + column, value[j]);
    }
}

// Copies one row of every field of the group that begins with field k. All loads of a step are issued
// before its first store: as many units of each size as a sector or, of the small ones, most groups
// have. They have registers of their own by size; in common ones, each load of 1 or 2 bytes would wait
// until the other is ruled out (sm_90, CUDA 13.0).
__device__ __forceinline__ void copy_packed(
    const Parameters& p, const Copy& copy, unsigned k, i64 position) {
    if (position >= p.count) return;
    const Row selected = row_of(p, load_index(p, position), copy.rows);
    const bool reads = selected.valid;
    const i64 row = reads ? selected.number : 0;
    const unsigned n8 = copy.piece & 255, n4 = copy.piece >> 8 & 255, n2 = copy.piece >> 16 & 255;
    const unsigned end8 = k + n8, end4 = end8 + n4, end2 = end4 + n2, end = end2 + (copy.piece >> 24);
#pragma unroll 1
    for (unsigned step = 0; step < copy.magic; step++) {
#pragma unroll 1
        for (unsigned column = 0; column < copy.shift; column++) {
            u64 eight[PACKED_8];
            unsigned four[PACKED_4];
            unsigned short two[PACKED_2];
            unsigned char one[PACKED_1];
            load_column(eight, p, k + PACKED_8 * step, end8, column, row, reads);
            load_column(four, p, end8 + PACKED_4 * step, end4, column, row, reads);
            load_column(two, p, end4 + PACKED_2 * step, end2, column, row, reads);
            load_column(one, p, end2 + PACKED_1 * step, end, column, row, reads);
            store_column(eight, p, k + PACKED_8 * step, end8, column, position);
            store_column(four, p, end8 + PACKED_4 * step, end4, column, position);
            store_column(two, p, end4 + PACKED_2 * step, end2, column, position);
            store_column(one, p, end2 + PACKED_1 * step, end, column, position);
        }
    }
#if BOUNDS == RAISE
    if (!reads)
        for (unsigned member = k; member < end; member++)
            report_row(p, p.field[member], position);
#endif
}
#endif

#if BOUNDS == RAISE
// Reports the bad rows among those whose first part this thread has copied. They are found again: to
// remember them would take instructions in calls without a bad index too. Inlined, because a call
// takes registers: 40 per thread in place of 30 (unroll 2, sm_90, CUDA 13.0).
__device__ __forceinline__ void report_parts(
    const Parameters& p, unsigned k, Count base, Count warp) {
    const Field& field = p.field[k];
    const bool by_warps = field.kind & BY_WARPS;
    if (by_warps && (threadIdx.x & 31)) return;
#pragma unroll 1
    for (int u = 0; u < (by_warps ? 1 : UNROLL); u++) {
        const Count part = by_warps ? warp : base + (Count)(u * THREADS);
        const Count position = divide(part, field);
        const bool first = part == position * parts_of(field);
        if (!first || part >= (Count)p.count * parts_of(field)) continue;
        if (!row_of(p, load_index(p, (i64)position), field.rows).valid)
            report_row(p, field, (i64)position);
    }
}
#endif

#if SHIFTED
#define IF_SHIFTED(...) __VA_ARGS__
#else
#define IF_SHIFTED(...)
#endif

// Comparisons in order of width, not a switch: its jump table is one more load from memory that no
// earlier launch has left in the cache.
#define COPY(kind)                                                                             \
    ((kind) == BY_WARPS + 4   ? copy_piece<int4>(p, copy, warp)                                \
     : (kind) == BY_WARPS + 3 ? copy_piece<int2>(p, copy, warp)                                \
     : (kind) == 4            ? copy_tile<int4>(p, copy, base)                                 \
     : (kind) == 3            ? copy_tile<int2>(p, copy, base)                                 \
     : (kind) == 2            ? copy_tile<int>(p, copy, base)                                  \
     : (kind) == 1            ? copy_tile<short>(p, copy, base)                                \
     : (kind) == 0            ? copy_tile<signed char>(p, copy, base)                          \
     : IF_SHIFTED((kind) == BY_WARPS + SHIFTED_ROWS ? copy_piece<Shifted>(p, copy, warp) :)    \
       IF_SHIFTED((kind) == SHIFTED_ROWS            ? copy_tile<Shifted>(p, copy, base) :)     \
                                copy_tile<Nothing>(p, copy, base))

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Parameters p) {
    // The field of this block: the last that starts at or before its tile.
    unsigned k = 0;
#if FIELDS <= 8
#pragma unroll
    for (int next = 1; next < FIELDS; next++) k += blockIdx.x >= p.first_tile[next];
#else
    for (unsigned step = SEARCH_STEP; step; step /= 2)
        if (k + step < FIELDS && blockIdx.x >= p.first_tile[k + step]) k += step;
#endif
    const Copy copy = copy_of(p, k);
#if PACKED
    if (copy.kind == PACKED_ROWS) {
        copy_packed(p, copy, k, (i64)(blockIdx.x - p.first_tile[k]) * THREADS + threadIdx.x);
        return;
    }
#endif
    const Count tile = (Count)(blockIdx.x - p.first_tile[k]);
    const Count base = tile * (Count)(THREADS * UNROLL) + threadIdx.x;
    const Count warp = tile * (Count)(THREADS / 32) + threadIdx.x / 32;
    const bool valid = COPY(copy.kind);
#if BOUNDS == RAISE
    // After the copies: between the loads it would make each wait for the last.
    if (!valid) report_parts(p, k, base, warp);
#else
    (void)valid;
#endif
}
