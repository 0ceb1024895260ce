// Add the rows of many gradients with one index: sum[k][row of indices[j]] += gradient[k][j].
//
// The backward pass of gather.cu, which explains what the two have in common: one launch for all
// fields, parameters by value, tiles of one field per thread block, 64-bit byte offsets. An index
// selects the same row as there; one that selects none adds nothing. It is not reported: the gather
// has done so. common.cuh comes before this.
//
//   FIELDS      capacity of the field table; entries past the fields in use start at tile 2^32 - 1
//   SEARCH_STEP the largest power of two below FIELDS, 0 for one field
//   THREADS     threads per block, a power of two
//   UNROLL      units in flight per thread, a power of two: all loads are issued before the first
//               addition
//
// Rows are added in the order in which threads happen to run, in the gradient's own type.

// A field's kind: the type of its elements, plus the binary logarithm of a unit's bytes.
#define HALF 0
#define BFLOAT 8
#define FLOAT 16
#define DOUBLE 24

struct Field {
    const char* gradient;  // of the gathered rows, one for each index
    char* sum;             // of the buffer: zeros, without gaps, aligned to 4 bytes
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
    i64 count;         // number of indices
    u64 unused;
    Field field[FIELDS];
};

// What is added as a whole: one element, or a pair of 2-byte elements.
struct Half { unsigned short bits; };
struct HalfPair { unsigned bits; };
struct BFloat { unsigned short bits; };
struct BFloatPair { unsigned bits; };

template <typename Word, int WORDS>
struct alignas(sizeof(Word) * WORDS) Unit {
    Word word[WORDS];
};

// Whether one instruction adds up to 16 bytes (PTX ISA 8.1, so CUDA 12.1). Before sm_90 the host
// makes units of one word, so that the words which a warp adds at once are neighbours in memory.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900 && \
    (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 1))
#define VECTORS 1
#else
#define VECTORS 0
#endif

__device__ __forceinline__ void add(float* sum, float value) { atomicAdd(sum, value); }
__device__ __forceinline__ void add(double* sum, double value) { atomicAdd(sum, value); }

#ifdef __CUDACC__
// As PTX, because the header that has the type does not come with every NVRTC.
__device__ __forceinline__ void add_half(unsigned short* sum, unsigned short value) {
    asm volatile("red.global.add.noftz.f16 [%0], %1;" ::"l"(sum), "h"(value) : "memory");
}
__device__ __forceinline__ void add_half_pair(unsigned* sum, unsigned value) {
    asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(sum), "r"(value) : "memory");
}
#endif
__device__ __forceinline__ void add(Half* sum, Half value) { add_half(&sum->bits, value.bits); }
__device__ __forceinline__ void add(HalfPair* sum, HalfPair value) {
    add_half_pair(&sum->bits, value.bits);
}

#if VECTORS
__device__ __forceinline__ void add(BFloat* sum, BFloat value) {
    asm volatile("red.global.add.noftz.bf16 [%0], %1;" ::"l"(sum), "h"(value.bits) : "memory");
}
__device__ __forceinline__ void add(BFloatPair* sum, BFloatPair value) {
    asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(sum), "r"(value.bits) : "memory");
}
#else
__device__ __forceinline__ unsigned bfloat_sum(unsigned a, unsigned b) {
    const float sum = __uint_as_float(a << 16) + __uint_as_float(b << 16);
    if (sum != sum) return 0x7fff;
    const unsigned bits = __float_as_uint(sum);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}
__device__ __forceinline__ void add(BFloat* sum, BFloat value) {
    unsigned short old = *(volatile unsigned short*)&sum->bits, before;
    do {
        before = old;
        old = atomicCAS(&sum->bits, before, (unsigned short)bfloat_sum(before, value.bits));
    } while (old != before);
}
__device__ __forceinline__ void add(BFloatPair* sum, BFloatPair value) {
    unsigned old = *(volatile unsigned*)&sum->bits, before;
    do {
        before = old;
        const unsigned low = bfloat_sum(before & 0xffff, value.bits & 0xffff);
        const unsigned high = bfloat_sum(before >> 16, value.bits >> 16);
        old = atomicCAS(&sum->bits, before, high << 16 | low);
    } while (old != before);
}
#endif

template <typename Word, int WORDS>
__device__ __forceinline__ void add(Unit<Word, WORDS>* sum, const Unit<Word, WORDS>& value) {
#pragma unroll
    for (int n = 0; n < WORDS; n++) add(sum->word + n, value.word[n]);
}

// A GPU adds 2-byte elements in pairs: red.f16 and red.bf16 become loops of compare and
// swap (sm_75 to sm_120, CUDA 13.0). So one is added with -0.0 for its neighbour, which that leaves
// as it is. The last of all may have no neighbour.
template <typename Pair, typename Single>
__device__ __forceinline__ void add_in_pair(Single* sum, Single value, const Single* end) {
    const unsigned high = (u64)sum >> 1 & 1;
    Single* low = sum - high;
    if (low + 2 > end) return add(sum, value);
    const Pair pair = {high ? (unsigned)value.bits << 16 | 0x8000 : 0x80000000 | value.bits};
    add((Pair*)low, pair);
}

#if VECTORS
#define ADD_PAIR_AND_QUAD(WORD, NOFTZ, TYPE, CONSTRAINT, VALUE)                                  \
    __device__ __forceinline__ void add(Unit<WORD, 2>* sum, const Unit<WORD, 2>& value) {        \
        const WORD* word = value.word;                                                           \
        asm volatile("red.global.add" NOFTZ ".v2" TYPE " [%0], {%1, %2};"                        \
                     ::"l"(sum), CONSTRAINT(word[0] VALUE), CONSTRAINT(word[1] VALUE)            \
                     : "memory");                                                                \
    }                                                                                            \
    __device__ __forceinline__ void add(Unit<WORD, 4>* sum, const Unit<WORD, 4>& value) {        \
        const WORD* word = value.word;                                                           \
        asm volatile("red.global.add" NOFTZ ".v4" TYPE " [%0], {%1, %2, %3, %4};"                \
                     ::"l"(sum), CONSTRAINT(word[0] VALUE), CONSTRAINT(word[1] VALUE),           \
                     CONSTRAINT(word[2] VALUE), CONSTRAINT(word[3] VALUE)                        \
                     : "memory");                                                                \
    }
ADD_PAIR_AND_QUAD(float, "", ".f32", "f", )
ADD_PAIR_AND_QUAD(HalfPair, ".noftz", ".f16x2", "r", .bits)
ADD_PAIR_AND_QUAD(BFloatPair, ".noftz", ".bf16x2", "r", .bits)
#endif

template <typename Value>
__device__ __forceinline__ void add_at(const Field& field, i64 at, const Value& value) {
    add((Value*)field.sum + at, value);
}
__device__ __forceinline__ void add_at(const Field& field, i64 at, const Unit<Half, 1>& value) {
    Half* sum = (Half*)field.sum;
    add_in_pair<HalfPair>(sum + at, value.word[0], sum + field.rows * field.units);
}
__device__ __forceinline__ void add_at(const Field& field, i64 at, const Unit<BFloat, 1>& value) {
    BFloat* sum = (BFloat*)field.sum;
    add_in_pair<BFloatPair>(sum + at, value.word[0], sum + field.rows * field.units);
}

// Adds UNROLL units of each thread. A row has a power of two of threads side by side, so that a
// thread finds its row and its column by shifts; one that is past the row's end idles.
template <typename Word, int WORDS>
__device__ __forceinline__ void add_tile(const Parameters& p, const Field& field, unsigned tile) {
    typedef Unit<Word, WORDS> Value;
    const unsigned lanes = field.log2_lanes, columns = field.log2_columns;
    const unsigned rows_aside = THREADS >> lanes;
    const unsigned band = tile / field.pieces, piece = tile - band * field.pieces;
    const i64 first = (i64)band * (rows_aside * (UNROLL >> columns)) + (threadIdx.x >> lanes);
    const unsigned first_column =
        (piece << (lanes + columns)) + (threadIdx.x & ((1u << lanes) - 1));
    INDEX index[UNROLL];
    Value value[UNROLL];
    bool active[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const i64 position = first + (u >> columns) * rows_aside;
        const unsigned column = first_column + ((u & ((1u << columns) - 1)) << lanes);
        active[u] = position < p.count && column < field.units;
        index[u] = 0;
        value[u] = Value();
        if (active[u]) {
            index[u] = __ldg(p.indices + position * p.index_stride);
            value[u] = ((const Value*)(field.gradient + position * field.gradient_stride))[column];
        }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        // An index that breaks the promise of UNCHECKED selects none either: what may then be read
        // must not be written.
        const i64 row = row_of(index[u], field.rows).number;
        const unsigned column = first_column + ((u & ((1u << columns) - 1)) << lanes);
        if (active[u] && (u64)row < (u64)field.rows) add_at(field, row * field.units + column, value[u]);
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
        case HALF + 1: return add_tile<Half, 1>(p, field, tile);
        case HALF + 2: return add_tile<HalfPair, 1>(p, field, tile);
        case HALF + 3: return add_tile<HalfPair, 2>(p, field, tile);
        case HALF + 4: return add_tile<HalfPair, 4>(p, field, tile);
        case BFLOAT + 1: return add_tile<BFloat, 1>(p, field, tile);
        case BFLOAT + 2: return add_tile<BFloatPair, 1>(p, field, tile);
        case BFLOAT + 3: return add_tile<BFloatPair, 2>(p, field, tile);
        case BFLOAT + 4: return add_tile<BFloatPair, 4>(p, field, tile);
        case FLOAT + 2: return add_tile<float, 1>(p, field, tile);
        case FLOAT + 3: return add_tile<float, 2>(p, field, tile);
        case FLOAT + 4: return add_tile<float, 4>(p, field, tile);
        case DOUBLE + 3: return add_tile<double, 1>(p, field, tile);
    }
}
