// The GPUs of the machine: HOLLOW_ARCHITECTURE, HOLLOW_DEVICES, HOLLOW_GIB, HOLLOW_STUCK.
// torch, Triton and inductor choose kernels and tile sizes by these numbers.
#include "hollow.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hollow {

static const Device DEVICES[] = {
    {"sm_80", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 167936, 2048, 40 << 20, 1410000, 1593000, 5120, 79.1},
    {"sm_89", "NVIDIA L40S", 8, 9, 142, 101376, 102400, 1536, 96 << 20, 2520000, 9001000, 384, 44.4},
    {"sm_90", "NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 233472, 2048, 50 << 20, 1980000, 2619000, 5120, 79.1},
    {"sm_100", "NVIDIA B200", 10, 0, 148, 232448, 233472, 2048, 126 << 20, 1965000, 3996000, 8192, 178.4},
    {"sm_120", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, 0, 188, 101376, 102400, 1536, 128 << 20, 2430000,
     12481000, 512, 94.9},
};

static const size_t CONTEXT = size_t(600) << 20; // bytes that a CUDA context and its modules take, about

static const char* setting(const char* name, const char* fallback) {
    const char* value = getenv(name);
    return value && *value ? value : fallback;
}

static const Device* find_device() {
    const char* wanted = setting("HOLLOW_ARCHITECTURE", "sm_90");
    for (const Device& candidate : DEVICES)
        if (!strcmp(candidate.architecture, wanted)) return &candidate;
    fprintf(stderr, "HOLLOW_ARCHITECTURE=%s: none of sm_80, sm_89, sm_90, sm_100, sm_120\n", wanted);
    exit(2);
}

const Device& device() {
    static const Device* found = find_device();
    return *found;
}

int device_count() {
    static int count = atoi(setting("HOLLOW_DEVICES", "1"));
    return count;
}

size_t capacity() {
    static double gib = atof(setting("HOLLOW_GIB", "0"));
    return size_t((gib > 0 ? gib : device().memory) * (size_t(1) << 30));
}

size_t usable_capacity() { return capacity() - CONTEXT; }

int attribute(int attribute) {
    const Device& gpu = device();
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return gpu.major;
    case cudaDevAttrComputeCapabilityMinor: return gpu.minor;
    case cudaDevAttrMultiProcessorCount: return gpu.multiprocessors;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return gpu.shared_memory_per_block;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return gpu.shared_memory;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return gpu.threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return gpu.clock;
    case cudaDevAttrMemoryClockRate: return gpu.memory_clock;
    case cudaDevAttrGlobalMemoryBusWidth: return gpu.bus_width;
    case cudaDevAttrL2CacheSize: return gpu.l2_cache;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    default: return 1; // most attributes say whether the GPU can do something
    }
}

bool is_stuck() {
    static const char* prefix = getenv("HOLLOW_STUCK");
    static const char* rank = setting("RANK", "0");
    if (!prefix) return false;
    std::string file = std::string(prefix) + "." + rank;
    return access(file.c_str(), F_OK) == 0;
}

void wait_while_stuck() {
    while (is_stuck()) usleep(50000);
}

} // namespace hollow
