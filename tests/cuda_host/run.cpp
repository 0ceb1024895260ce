// A kernel of kernels/ as a host function: every block, every thread, one after another.
#include "shim.h"
#include "common.cuh"
#include SOURCE

extern "C" void run(unsigned grid, unsigned threads, void** parameters) {
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            KERNEL(*(const Parameters*)parameters[0]);
}

// What the host packs must be what the compiler sees.
extern "C" size_t parameters_size() { return sizeof(Parameters); }
