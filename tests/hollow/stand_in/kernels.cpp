// Kernels: those of the CUDA runtime (torch's own) and of the driver (Triton's). They are counted by name, and do nothing.
//
// Two are computed after all where the host has just written their input: torch's pipelines vote on whether their shapes
// are static with a fill and a product of one int32, and the host reads the result.
#include "hollow.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

std::mutex mutex;

std::unordered_map<const void*, std::string>& names() {
    static auto* made = new std::unordered_map<const void*, std::string>; // libraries register before main()
    return *made;
}

std::string name_of(const void* handle) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = names().find(handle);
    return found == names().end() ? "unknown kernel" : found->second;
}

bool has(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

bool recall_int(const void* address, int* value) {
    std::string contents;
    if (!hollow::recall(address, sizeof *value, &contents)) return false;
    memcpy(value, contents.data(), sizeof *value);
    return true;
}

void remember_int(const void* address, int value) {
    hollow::remember(address, std::string(reinterpret_cast<const char*>(&value), sizeof value));
}

// Elementwise kernels get the number of elements, the functor, and the addresses of the result and of the operands.
bool compute(const std::string& name, void** arguments) {
    bool fills = has(name, "11FillFunctorIiE"), multiplies = has(name, "10MulFunctorIiE");
    if (!has(name, "29vectorized_elementwise_kernel") || !(fills || multiplies)) return false;
    if (*static_cast<int*>(arguments[0]) != 1) return false;
    auto** addresses = static_cast<char**>(arguments[2]);
    if (fills) {
        remember_int(addresses[0], *static_cast<int*>(arguments[1]));
        return true;
    }
    int left, right;
    if (!recall_int(addresses[1], &left) || !recall_int(addresses[2], &right)) return false;
    remember_int(addresses[0], left * right);
    return true;
}

} // namespace

namespace hollow {

void name_kernel(const void* handle, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    names()[handle] = name;
}

void launch(const void* handle, void** arguments, const void* stream) {
    std::string name = name_of(handle);
    work(stream, "launch", name);
    if (!compute(name, arguments)) forget_all();
}

void launch_named(const std::string& name, const void* stream) {
    work(stream, "launch", name);
    forget_all();
}

} // namespace hollow

// -- the runtime: kernels are registered when a library is loaded, and launched through a stub on the host

EXPORTED void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORTED void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                     int*) {
    hollow::name_kernel(stub, name);
}

// kernel<<<grid, block, shared memory, stream>>>(...) pushes its configuration; the stub pops it.

struct Configuration {
    dim3 grid, block;
    size_t shared_memory;
    void* stream;
};

static thread_local std::vector<Configuration> configurations;

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_memory, void* stream) {
    configurations.push_back({grid, block, shared_memory, stream});
    return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_memory, void* stream) {
    Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared_memory = last.shared_memory;
    *static_cast<void**>(stream) = last.stream;
    return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(stub));
    return cudaSuccess;
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t,
                                      cudaStream_t stream) {
    hollow::launch(kernel, arguments, stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
    hollow::launch(stub, arguments, stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* stub, void** arguments) {
    hollow::launch(stub, arguments, how->stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->binaryVersion = attributes->ptxVersion = hollow::device().major * 10 + hollow::device().minor;
    attributes->maxDynamicSharedSizeBytes = hollow::device().shared_memory_per_block;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                         cudaLibraryOption*, void**, unsigned) {
    *library = reinterpret_cast<cudaLibrary_t>(1);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
    *kernel = reinterpret_cast<cudaKernel_t>(strdup(name));
    hollow::name_kernel(*kernel, name);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

// -- the driver: Triton loads what ptxas has made, and torch what NVRTC has made

EXPORTED CUresult cuModuleLoad(CUmodule* module, const char*) {
    hollow::unsafe_call("cuModuleLoad");
    *module = reinterpret_cast<CUmodule>(1);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void*) { return cuModuleLoad(module, nullptr); }

EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    return cuModuleLoad(module, nullptr);
}

EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(strdup(name));
    hollow::name_kernel(*function, name);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 CUstream stream, void** arguments, void**) {
    hollow::launch(function, arguments, stream);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void** arguments, void**) {
    hollow::launch(function, arguments, how->hStream);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                            unsigned, CUstream stream, void** arguments) {
    hollow::launch(function, arguments, stream);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    *blocks = 2;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    *clusters = 2;
    return CUDA_SUCCESS;
}
