// The CUDA runtime: devices and streams. Streams have nothing to do; events and captures are in capture.cpp.
#include "hollow.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstring>

static thread_local int current_device = 0; // CUDA keeps it per thread: a new thread begins with GPU 0

// -- devices

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
    *count = hollow::device_count();
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= hollow::device_count()) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
    const hollow::Device& gpu = hollow::device();
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, gpu.name);
    properties->major = gpu.major;
    properties->minor = gpu.minor;
    properties->multiProcessorCount = gpu.multiprocessors;
    properties->totalGlobalMem = hollow::capacity();
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = gpu.shared_memory_per_block;
    properties->sharedMemPerMultiprocessor = gpu.shared_memory;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = gpu.threads;
    properties->maxBlocksPerMultiProcessor = 32;
    const int grid[] = {2147483647, 65535, 65535}, block[] = {1024, 1024, 64};
    memcpy(properties->maxGridSize, grid, sizeof grid);
    memcpy(properties->maxThreadsDim, block, sizeof block);
    properties->l2CacheSize = gpu.l2_cache;
    properties->memoryBusWidth = gpu.bus_width;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
    properties->canMapHostMemory = 1;
    properties->asyncEngineCount = 3;
    properties->textureAlignment = 512;
    properties->totalConstMem = 65536;
    properties->pciBusID = index + 1;
    for (int i = 0; i < 16; i++) properties->uuid.bytes[i] = char(i + index);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = hollow::attribute(attribute);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORTED cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORTED cudaError_t cudaDeviceSynchronize() {
    hollow::unsafe_call("cudaDeviceSynchronize");
    hollow::count("sync", "cudaDeviceSynchronize");
    hollow::wait_while_stuck();
    return cudaSuccess;
}

// -- streams

static std::atomic<uintptr_t> next_stream{0x1000};

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    *stream = reinterpret_cast<cudaStream_t>(next_stream += 16);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    hollow::unsafe_call("cudaStreamSynchronize", stream);
    hollow::count("sync", "cudaStreamSynchronize");
    hollow::wait_while_stuck();
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
    hollow::unsafe_call("cudaStreamQuery", stream);
    return hollow::is_stuck() ? cudaErrorNotReady : cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument, unsigned) {
    if (hollow::is_capturing(stream)) hollow::obstacle("cudaStreamAddCallback");
    function(stream, cudaSuccess, argument);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
    function(argument);
    return cudaSuccess;
}
