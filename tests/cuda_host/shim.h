// The CUDA names that kernels/gather.cu uses, for a C++ compiler: its threads run one after another.
#include <cstdint>
#include <cstddef>

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
inline unsigned long long atomicAdd_system(unsigned long long* address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
