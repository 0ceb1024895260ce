// kernels/gather.cu as a host function: every block, every thread, one after another.
#include "shim.h"
#include "gather.cu"

extern "C" void run(unsigned grid, unsigned threads, void** parameters) {
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            gather(*(const Parameters*)parameters[0]);
}

// What the host packs must be what the compiler sees.
extern "C" size_t parameters_size() { return sizeof(Parameters); }
