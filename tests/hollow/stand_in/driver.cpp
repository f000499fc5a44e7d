// The CUDA driver: what Triton, NVRTC, and torch's expandable segments ask of it. Its kernels are in kernels.cpp.
#include "hollow.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

// -- devices and contexts: one context per GPU, always current

static CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(0x100 + device)); }

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORTED CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetCount(int* count) {
    *count = hollow::device_count();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGet(CUdevice* device, int index) {
    *device = index;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetName(char* text, int length, CUdevice) {
    snprintf(text, length, "%s", hollow::device().name);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = hollow::attribute(attribute);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
    int device = 0;
    cudaGetDevice(&device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
    cudaGetDevice(device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxPopCurrent_v2(CUcontext*) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORTED CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 1024;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "an error of the hollow GPU";
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorName(CUresult, const char** text) { return cuGetErrorString(CUDA_SUCCESS, text); }

EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(value) = pointer;
    else *static_cast<int*>(value) = 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    cudaStreamCaptureStatus of_runtime;
    cudaStreamIsCapturing(stream, &of_runtime);
    *status = static_cast<CUstreamCaptureStatus>(of_runtime);
    return CUDA_SUCCESS;
}

// -- linking, which NVRTC's callers do: the result is never run

EXPORTED CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState* state) {
    *state = reinterpret_cast<CUlinkState>(1);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLinkComplete(CUlinkState, void** binary, size_t* bytes) {
    *binary = nullptr;
    *bytes = 0;
    return CUDA_SUCCESS;
}

// -- expandable segments: torch reserves addresses and maps memory into them piece by piece

static std::mutex mutex;
static std::map<CUmemGenericAllocationHandle, size_t> pieces; // bytes by handle
static CUmemGenericAllocationHandle next_handle = 1;

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    hollow::add_address_range(reserved, bytes);
    *address = reinterpret_cast<CUdeviceptr>(reserved);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
    hollow::remove_address_range(reinterpret_cast<void*>(address));
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                              unsigned long long) {
    if (!hollow::take_capacity(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    hollow::count("allocation", "device memory", bytes);
    std::lock_guard<std::mutex> lock(mutex);
    *handle = next_handle++;
    pieces[*handle] = bytes;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    std::lock_guard<std::mutex> lock(mutex);
    hollow::give_capacity(pieces[handle]);
    pieces.erase(handle);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = size_t(2) << 20;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// -- how torch finds the driver's functions. It asks for all that it may ever use; one that is missing here succeeds and
// does nothing, and the counts name it when it is called.

static CUresult does_nothing(...) {
    hollow::count("missing", "a function of the driver");
    return CUDA_SUCCESS;
}

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (!*function) *function = reinterpret_cast<void*>(does_nothing);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// cuBLAS and NCCL look for private tables of the driver, and do without them.
EXPORTED CUresult cuGetExportTable(const void** table, const CUuuid*) {
    *table = nullptr;
    return CUDA_ERROR_NOT_FOUND;
}
