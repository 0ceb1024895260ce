// The CUDA names that kernels/*.cu use, for a C++ compiler: the threads run one after another.
#include <cmath>
#include <cstdint>
#include <cstddef>
#include <cstring>

struct Index3 { unsigned x, y, z; };
static thread_local Index3 threadIdx, blockIdx;

struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

template <typename T> inline T __ldg(const T* address) { return *address; }
template <typename T> inline T __ldcs(const T* address) { return *address; }
template <typename T> inline void __stcs(T* address, const T& value) { *address = value; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <typename T> inline T atomicAdd(T* address, T value) {
    const T old = *address;
    *address = old + value;
    return old;
}
// Threads of a test that report at once share a board.
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// IEEE half precision, in place of the PTX that converts it on a GPU.
inline float float_of_half(unsigned bits) {
    const unsigned sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}
inline unsigned short half_of_float(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
    const float size = std::fabs(value);
    if (size != size) return 0x7fff;
    if (size < 0x1p-14f) return sign | (unsigned)std::nearbyint(size * 0x1p24f);
    if (size >= 65520.0f) return sign | 0x7c00;
    const unsigned bits = __float_as_uint(size);
    return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}
