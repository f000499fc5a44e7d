// NCCL: communicators that know their size, and collectives that move nothing. They are counted with the bytes of the
// whole (gathered, reduced or scattered) tensor. Short messages between two ranks do arrive: see messages.cpp.
#include "hollow.h"

#define __CUDA_FP16_H__ // these headers, which nccl.h includes, need CUDA's compiler
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

struct ncclComm {
    std::string id; // the same on all ranks
    int rank, size;
    std::map<int, long> sent, received; // messages by the other rank
    std::mutex mutex;
    int splits = 0;
};

static std::string hexadecimal(const ncclUniqueId& id) {
    std::string text;
    for (int i = 0; i < 16; i++) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", (unsigned char)id.internal[i]);
        text += digits;
    }
    return text;
}

static size_t bytes_of(size_t count, ncclDataType_t type) {
    switch (type) {
    case ncclInt32: case ncclUint32: case ncclFloat32: return count * 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return count * 8;
    case ncclFloat16: case ncclBfloat16: return count * 2;
    default: return count;
    }
}

static ncclResult_t collective(const char* name, size_t bytes, cudaStream_t stream) {
    hollow::work(stream, "collective", name, bytes);
    hollow::forget_all();
    return ncclSuccess;
}

// -- communicators

EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    return getentropy(id->internal, 16) == 0 ? ncclSuccess : ncclSystemError;
}

EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
    hollow::unsafe_call("ncclCommInitRank");
    hollow::count("communicator", "ncclCommInitRank");
    *communicator = new ncclComm{hexadecimal(id), rank, size, {}, {}, {}};
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
    return ncclCommInitRank(communicator, size, id, rank);
}

EXPORTED ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int size, int rank, int, ncclUniqueId* ids,
                                               ncclConfig_t*) {
    return ncclCommInitRank(communicator, size, ids[0], rank);
}

// The ranks exchange their colors if all are processes of this machine. Else the part is taken for the whole, which counts
// more bytes.
EXPORTED ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t* part, ncclConfig_t*) {
    hollow::count("communicator", "ncclCommSplit");
    const char* processes = getenv("LOCAL_WORLD_SIZE");
    if (!processes || atoi(processes) < whole->size) {
        *part = new ncclComm{whole->id, whole->rank, whole->size, {}, {}, {}};
        return ncclSuccess;
    }
    std::string split = whole->id + ".split" + std::to_string(whole->splits++);
    std::string own = std::to_string(color) + " " + std::to_string(key);
    for (int other = 0; other < whole->size; other++)
        if (other != whole->rank) hollow::send_message(hollow::message_file(split, whole->rank, other, 0), own);
    std::set<std::pair<int, int>> members; // key and rank: ordered as NCCL orders the part's ranks
    for (int other = 0; other < whole->size; other++) {
        std::string text = own;
        if (other != whole->rank) text = hollow::receive_message(hollow::message_file(split, other, whole->rank, 0));
        int its_color, its_key;
        sscanf(text.c_str(), "%d %d", &its_color, &its_key);
        if (its_color == color) members.insert({its_key, other});
    }
    if (color == NCCL_SPLIT_NOCOLOR) {
        *part = nullptr;
        return ncclSuccess;
    }
    int position = std::distance(members.begin(), members.find({key, whole->rank}));
    *part = new ncclComm{split + "." + std::to_string(color), position, (int)members.size(), {}, {}, {}};
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

EXPORTED ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    hollow::count("communicator", "ncclCommDestroy");
    delete communicator;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommAbort(ncclComm_t communicator) { return ncclCommDestroy(communicator); }

EXPORTED ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
    *count = communicator->size;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
    *rank = communicator->rank;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
    *handle = reinterpret_cast<void*>(1);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
EXPORTED ncclResult_t ncclGroupStart() { return ncclSuccess; }
EXPORTED ncclResult_t ncclGroupEnd() { return ncclSuccess; }

EXPORTED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t, ncclScalarResidence_t,
                                               ncclComm_t) {
    *operation = ncclNumOps;
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// -- collectives

// torch 2.15's pipelines vote by a minimum of one int32: all ranks are taken to have what this one has.
EXPORTED ncclResult_t ncclAllReduce(const void* sent, void* result, size_t count, ncclDataType_t type,
                                    ncclRedOp_t operation, ncclComm_t, cudaStream_t stream) {
    std::string contents;
    bool known = operation == ncclMin && hollow::recall(sent, bytes_of(count, type), &contents);
    collective("ncclAllReduce", bytes_of(count, type), stream);
    if (known) hollow::remember(result, contents);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclAllGather(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t communicator,
                                    cudaStream_t stream) {
    return collective("ncclAllGather", bytes_of(count, type) * communicator->size, stream);
}

EXPORTED ncclResult_t ncclReduceScatter(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t,
                                        ncclComm_t communicator, cudaStream_t stream) {
    return collective("ncclReduceScatter", bytes_of(count, type) * communicator->size, stream);
}

EXPORTED ncclResult_t ncclAlltoAll(const void*, void*, size_t count, ncclDataType_t type, ncclComm_t communicator,
                                   cudaStream_t stream) {
    return collective("ncclAlltoAll", bytes_of(count, type) * communicator->size, stream);
}

EXPORTED ncclResult_t ncclBroadcast(const void*, void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
    return collective("ncclBroadcast", bytes_of(count, type), stream);
}

EXPORTED ncclResult_t ncclBcast(void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
    return collective("ncclBroadcast", bytes_of(count, type), stream);
}

EXPORTED ncclResult_t ncclReduce(const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t, int, ncclComm_t,
                                 cudaStream_t stream) {
    return collective("ncclReduce", bytes_of(count, type), stream);
}

// -- messages

EXPORTED ncclResult_t ncclSend(const void* buffer, size_t count, ncclDataType_t type, int receiver, ncclComm_t communicator,
                               cudaStream_t stream) {
    size_t bytes = bytes_of(count, type);
    hollow::work(stream, "collective", "ncclSend", bytes);
    if (bytes > hollow::REMEMBERED) return ncclSuccess;
    std::lock_guard<std::mutex> lock(communicator->mutex);
    long number = communicator->sent[receiver]++;
    std::string file = hollow::message_file(communicator->id, communicator->rank, receiver, number), contents;
    hollow::recall(buffer, bytes, &contents); // not known: the message is empty, and what is received is not known either
    if (!file.empty()) hollow::send_message(file, contents);
    return ncclSuccess;
}

EXPORTED ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t type, int sender, ncclComm_t communicator,
                               cudaStream_t stream) {
    size_t bytes = bytes_of(count, type);
    hollow::work(stream, "collective", "ncclRecv", bytes);
    if (bytes > hollow::REMEMBERED) return ncclSuccess;
    std::lock_guard<std::mutex> lock(communicator->mutex);
    long number = communicator->received[sender]++;
    std::string file = hollow::message_file(communicator->id, sender, communicator->rank, number);
    if (!file.empty()) hollow::remember_message(buffer, file, bytes);
    return ncclSuccess;
}
