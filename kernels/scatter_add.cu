// Add the rows of many gradients with one index: sum[k][row of indices[j]] += gradient[k][j].
//
// The backward pass of gather.cu, which explains what the two have in common: one launch for all
// fields, parameters by value, tiles of one field per thread block, 64-bit byte offsets. An index
// selects the same row as there; one that selects none adds nothing. It is not reported: the gather
// has done so. common.cuh comes before this.
//
//   STEP        ADD; where there are 2-byte elements, CLAIM of these before it and ROUND after it
//   FIELDS      capacity of the field table; entries past the fields in use start at tile 2^32 - 1
//   SEARCH_STEP the largest power of two below FIELDS, 0 for one field
//   THREADS     threads per block, a power of two
//   UNROLL      units in flight per thread, a power of two: all loads are issued before the first
//               addition
//
// Rows are added in the order in which threads happen to run: floats and doubles where the buffer's
// gradient is, 2-byte elements as floats elsewhere, so that each sum is rounded once. There is such
// a sum for each index, not for each row of the buffer, of which there may be far more. In CLAIM the
// positions of all indices of a row are written to the row's place, where one of them remains, and
// the sums become zeros; ADD adds to that one's sum; ROUND writes that sum to the row. So each
// element of the gradient has 4 bytes that are written, added to and read. A float for each element
// of the buffer would be 10 bytes for each of those (zeros, a read, the rounded sum), where the
// zeros that its gradient begins as are 2.

#define CLAIM 0
#define ADD 1
#define ROUND 2

// A field's kind: the type of its elements, plus the binary logarithm of a unit's bytes.
#define HALF 0
#define BFLOAT 8
#define FLOAT 16
#define DOUBLE 24

struct Field {
    const char* gradient;  // of the gathered rows, one for each index
    char* sum;             // of the buffer: zeros, without gaps
    char* float_sum;       // of 2-byte elements: one row for each index, without gaps
    unsigned* place;       // of 2-byte elements: for each row of the buffer, where its float_sum is
    i64 rows;              // valid indices are 0 .. rows - 1
    i64 gradient_stride;   // bytes from one row to the next
    unsigned first_tile;
    unsigned units;        // of a row, below 2^31
    unsigned pieces;       // tiles side by side that a row takes
    unsigned char kind;
    unsigned char log2_lanes;    // threads side by side on a row
    unsigned char log2_columns;  // units of a thread side by side on a row; UNROLL / columns rows
    unsigned char unused;
};

struct Parameters {
    const INDEX* indices;
    i64 index_stride;  // elements from one index to the next
    i64 count;         // number of indices; with 2-byte elements, at most 2^32
    u64 unused;
    Field field[FIELDS];
};

struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

template <typename Element, int ELEMENTS>
struct alignas(sizeof(Element) * ELEMENTS) Unit {
    Element element[ELEMENTS];
};

#ifdef __CUDACC__
// As PTX, because the header that has the type does not come with every NVRTC.
__device__ __forceinline__ float float_of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short half_of_float(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// An element as what it is added as, and back: to nearest, ties to even.
__device__ __forceinline__ float wide(float value) { return value; }
__device__ __forceinline__ double wide(double value) { return value; }
__device__ __forceinline__ float wide(Half value) { return float_of_half(value.bits); }
__device__ __forceinline__ float wide(BFloat value) {
    return __uint_as_float((unsigned)value.bits << 16);
}
template <typename Element> __device__ Element narrow(float value);
template <> __device__ __forceinline__ Half narrow(float value) { return {half_of_float(value)}; }
template <> __device__ __forceinline__ BFloat narrow(float value) {
    if (value != value) return {0x7fff};
    const unsigned bits = __float_as_uint(value);
    return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// One instruction adds 16 bytes from sm_90 on (PTX ISA 8.1, so CUDA 12.1). Before, the host makes
// units of one element, so that what a warp adds at once is side by side in memory. A GPU's float
// additions take what is below 2^-126 as zero, which of 2-byte elements only bfloats can be.
template <typename Element, int ELEMENTS>
__device__ __forceinline__ void add(
    Unit<Element, ELEMENTS>* sum, const Unit<Element, ELEMENTS>& value) {
#pragma unroll
    for (int n = 0; n < ELEMENTS; n++) atomicAdd(sum->element + n, value.element[n]);
}
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900 && \
    (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 1))
__device__ __forceinline__ void add(Unit<float, 2>* sum, const Unit<float, 2>& value) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};"
                 ::"l"(sum), "f"(value.element[0]), "f"(value.element[1])
                 : "memory");
}
__device__ __forceinline__ void add(Unit<float, 4>* sum, const Unit<float, 4>& value) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(sum), "f"(value.element[0]), "f"(value.element[1]), "f"(value.element[2]),
                   "f"(value.element[3])
                 : "memory");
}
#endif

// Where a thread's units are. A row has a power of two of threads side by side, so that a thread
// finds its row and its column by shifts; one that is past the row's end idles.
struct Slots {
    i64 first;
    unsigned first_column, lanes, columns;

    __device__ __forceinline__ Slots(const Field& field, unsigned tile)
        : lanes(field.log2_lanes), columns(field.log2_columns) {
        const unsigned band = tile / field.pieces, piece = tile - band * field.pieces;
        first = (i64)band * ((THREADS >> lanes) * (UNROLL >> columns)) + (threadIdx.x >> lanes);
        first_column = (piece << (lanes + columns)) + (threadIdx.x & ((1u << lanes) - 1));
    }
    __device__ __forceinline__ i64 position(int u) const {
        return first + (u >> columns) * (THREADS >> lanes);
    }
    __device__ __forceinline__ unsigned column(int u) const {
        return first_column + ((u & ((1u << columns) - 1)) << lanes);
    }
};

// The step for UNROLL units of each thread.
template <typename Element, int ELEMENTS>
__device__ __forceinline__ void run_tile(const Parameters& p, const Field& field, unsigned tile) {
    typedef Unit<Element, ELEMENTS> Value;
    typedef Unit<decltype(wide(Element())), ELEMENTS> Sum;
    const bool apart = sizeof(Sum) != sizeof(Value);
    Sum* const sums = (Sum*)(apart ? field.float_sum : field.sum);
    const Slots slots(field, tile);
    INDEX index[UNROLL];
    Value value[UNROLL];
    bool active[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const i64 position = slots.position(u);
        active[u] = position < p.count && slots.column(u) < field.units;
        index[u] = 0;
        value[u] = Value();
        if (!active[u]) continue;
        index[u] = __ldg(p.indices + position * p.index_stride);
#if STEP == ADD
        const char* row = field.gradient + position * field.gradient_stride;
        value[u] = ((const Value*)row)[slots.column(u)];
#endif
    }
    i64 row[UNROLL], sum_row[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        // An index that breaks the promise of UNCHECKED selects none either: what may then be read
        // must not be written.
        row[u] = row_of(index[u], field.rows).number;
        active[u] = active[u] && (u64)row[u] < (u64)field.rows;
        sum_row[u] = row[u];
        if (apart && STEP == CLAIM) sum_row[u] = slots.position(u);
        if (apart && STEP != CLAIM && active[u]) sum_row[u] = __ldg(field.place + row[u]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        if (!active[u]) continue;
        const unsigned column = slots.column(u);
        Sum* const sum = sums + sum_row[u] * field.units + column;
#if STEP == CLAIM
        *sum = Sum();
        if (column == 0) *(volatile unsigned*)(field.place + row[u]) = (unsigned)sum_row[u];
#elif STEP == ADD
        Sum added;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n++) added.element[n] = wide(value[u].element[n]);
        add(sum, added);
#else
        if (sum_row[u] != slots.position(u)) continue;
        const Sum found = *sum;
#pragma unroll
        for (int n = 0; n < ELEMENTS; n++) value[u].element[n] = narrow<Element>(found.element[n]);
        ((Value*)field.sum)[row[u] * field.units + column] = value[u];
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_add(const __grid_constant__ Parameters p) {
    // The field of this block: the last that starts at or before its tile.
    unsigned k = 0;
    for (unsigned step = SEARCH_STEP; step; step /= 2)
        if (k + step < FIELDS && blockIdx.x >= p.field[k + step].first_tile) k += step;
    const Field& field = p.field[k];
    const unsigned tile = blockIdx.x - field.first_tile;
    switch (field.kind) {
        case HALF + 1: return run_tile<Half, 1>(p, field, tile);
        case HALF + 2: return run_tile<Half, 2>(p, field, tile);
        case HALF + 3: return run_tile<Half, 4>(p, field, tile);
        case BFLOAT + 1: return run_tile<BFloat, 1>(p, field, tile);
        case BFLOAT + 2: return run_tile<BFloat, 2>(p, field, tile);
        case BFLOAT + 3: return run_tile<BFloat, 4>(p, field, tile);
#if STEP == ADD
        case FLOAT + 2: return run_tile<float, 1>(p, field, tile);
        case FLOAT + 3: return run_tile<float, 2>(p, field, tile);
        case FLOAT + 4: return run_tile<float, 4>(p, field, tile);
        case DOUBLE + 3: return run_tile<double, 1>(p, field, tile);
#endif
    }
}
