// Device memory: address space without pages. 80 GiB of it cost nothing, and a host that follows a device pointer faults.
//
// What is read back from it is zero, except a few bytes that are known (REMEMBERED): those that the host has just copied
// there, and what the kernels in kernels.cpp have computed from them. They are forgotten at the first kernel that is not
// computed, for it may have overwritten them.
#include "hollow.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

namespace {

using Ranges = std::map<uintptr_t, size_t>; // bytes by the first address

std::mutex mutex;
Ranges device_ranges, host_ranges, registered_ranges; // the last are the program's own, which it has pinned

struct Piece {
    size_t bytes;
    std::string contents;
    std::string message; // file with the contents, which may not be there yet; empty: the contents are here
};

std::map<uintptr_t, Piece> known; // by address
size_t used = 0;

Ranges::iterator containing(Ranges& ranges, const void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto found = ranges.upper_bound(address);
    if (found == ranges.begin()) return ranges.end();
    --found;
    return address < found->first + found->second ? found : ranges.end();
}

bool is_in(Ranges& ranges, const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    return containing(ranges, pointer) != ranges.end();
}

void* map_pages(size_t bytes, int protection) {
    void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return address == MAP_FAILED ? nullptr : address;
}

void unmap(Ranges& ranges, void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
    if (found == ranges.end()) return;
    munmap(address, found->second);
    ranges.erase(found);
}

// Zeros, without taking memory where the pages are ours: a snapshot of 96 GB of weights stays free.
void clear_host(void* target, size_t bytes) {
    const uintptr_t page = 4096, address = reinterpret_cast<uintptr_t>(target);
    const uintptr_t first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (first >= last || !is_in(host_ranges, target)) {
        memset(target, 0, bytes);
        return;
    }
    memset(target, 0, first - address);
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    memset(reinterpret_cast<void*>(last), 0, address + bytes - last);
}

size_t short_enough(size_t bytes) { return bytes <= hollow::REMEMBERED ? bytes : 0; }

void copy(void* target, const void* source, size_t bytes, const void* stream) {
    bool to_device = hollow::is_on_device(target), from_device = hollow::is_on_device(source);
    if (hollow::is_capturing(stream)) {
        if (from_device && !to_device) hollow::obstacle("cudaMemcpyAsync to the host");
        else if (to_device && !from_device) {
            if (hollow::is_pinned(source)) hollow::read_again(source, bytes);
            else hollow::obstacle("cudaMemcpyAsync from pageable memory");
        }
    }
    std::string contents;
    if (to_device && from_device) {
        hollow::work(stream, "copy", "on the device", bytes);
        if (hollow::recall(source, bytes, &contents)) hollow::remember(target, contents);
    } else if (to_device) {
        hollow::work(stream, "copy", "to the device", bytes);
        hollow::remember(target, std::string(static_cast<const char*>(source), short_enough(bytes)));
    } else if (from_device) {
        hollow::work(stream, "copy", "to the host", bytes);
        if (hollow::recall(source, bytes, &contents)) memcpy(target, contents.data(), bytes);
        else clear_host(target, bytes);
    } else {
        memcpy(target, source, bytes);
    }
}

} // namespace

namespace hollow {

bool take_capacity(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    if (used + bytes > usable_capacity()) return false;
    used += bytes;
    return true;
}

void give_capacity(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    used -= bytes;
}

void add_address_range(void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    device_ranges[reinterpret_cast<uintptr_t>(address)] = bytes;
}

void remove_address_range(void* address) { unmap(device_ranges, address); }

void* allocate(size_t bytes) {
    if (!take_capacity(bytes)) return nullptr;
    void* address = map_pages(bytes, PROT_NONE);
    if (!address) return nullptr;
    add_address_range(address, bytes);
    count("allocation", "device memory", bytes);
    return address;
}

void release(void* address) {
    size_t bytes = 0;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = device_ranges.find(reinterpret_cast<uintptr_t>(address));
        if (found == device_ranges.end()) return;
        bytes = found->second;
    }
    unmap(device_ranges, address);
    give_capacity(bytes);
}

bool is_on_device(const void* address) { return is_in(device_ranges, address); }
bool is_pinned(const void* address) { return is_in(host_ranges, address) || is_in(registered_ranges, address); }

void remember(const void* address, const std::string& contents) {
    std::lock_guard<std::mutex> lock(mutex);
    auto key = reinterpret_cast<uintptr_t>(address);
    if (contents.empty() || contents.size() > REMEMBERED) known.erase(key);
    else known[key] = {contents.size(), contents, ""};
}

void remember_message(const void* address, const std::string& file, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    known[reinterpret_cast<uintptr_t>(address)] = {bytes, "", file};
}

bool recall(const void* address, size_t bytes, std::string* contents) {
    Piece piece;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto found = known.find(reinterpret_cast<uintptr_t>(address));
        if (found == known.end() || found->second.bytes != bytes) return false;
        piece = found->second;
    }
    if (!piece.message.empty()) {
        piece.contents = receive_message(piece.message); // waits, so without the lock
        remember(address, piece.contents);
    }
    *contents = piece.contents;
    return contents->size() == bytes;
}

void forget_all() {
    std::lock_guard<std::mutex> lock(mutex);
    known.clear();
}

} // namespace hollow

// -- the runtime's functions

EXPORTED cudaError_t cudaMalloc(void** address, size_t bytes) {
    hollow::unsafe_call("cudaMalloc"); // torch's allocator is exempt: it calls this in mode relaxed
    *address = hollow::allocate(bytes);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORTED cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }

EXPORTED cudaError_t cudaFree(void* address) {
    hollow::unsafe_call("cudaFree");
    hollow::release(address);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    std::lock_guard<std::mutex> lock(mutex);
    *total = hollow::capacity();
    *free = hollow::usable_capacity() - used;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    hollow::unsafe_call("cudaHostAlloc");
    *address = map_pages(bytes, PROT_READ | PROT_WRITE);
    if (!*address) return cudaErrorMemoryAllocation;
    std::lock_guard<std::mutex> lock(mutex);
    host_ranges[reinterpret_cast<uintptr_t>(*address)] = bytes;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
    hollow::unsafe_call("cudaFreeHost");
    unmap(host_ranges, address);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(mutex);
    registered_ranges[reinterpret_cast<uintptr_t>(address)] = bytes;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaHostUnregister(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    registered_ranges.erase(reinterpret_cast<uintptr_t>(address));
    return cudaSuccess;
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    memset(attributes, 0, sizeof *attributes);
    cudaGetDevice(&attributes->device);
    if (is_in(device_ranges, address)) attributes->type = cudaMemoryTypeDevice;
    else if (hollow::is_pinned(address)) attributes->type = cudaMemoryTypeHost;
    else attributes->type = cudaMemoryTypeUnregistered;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    copy(target, source, bytes, stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    hollow::unsafe_call("cudaMemcpy");
    hollow::count("sync", "cudaMemcpy");
    hollow::wait_while_stuck();
    copy(target, source, bytes, nullptr);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
    copy(target, source, bytes, stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

EXPORTED cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    hollow::work(stream, "memset", "cudaMemsetAsync", bytes);
    hollow::remember(target, std::string(short_enough(bytes), char(value)));
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemset(void* target, int value, size_t bytes) {
    hollow::unsafe_call("cudaMemset");
    return cudaMemsetAsync(target, value, bytes, nullptr);
}

EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char constants[4096]; // read by kernels alone
    *address = constants;
    return cudaSuccess;
}

// Memory pools: torch only sets them up for its "cudaMallocAsync" backend.

EXPORTED cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    *pool = reinterpret_cast<cudaMemPool_t>(1);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
    *static_cast<uint64_t*>(value) = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORTED cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
