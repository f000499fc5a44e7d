// cuBLAS and cuBLASLt: each product is one launch. No function looks at its arguments but those that return something, and
// at streams: torch sets a handle's stream before it uses it, in each thread.
#include "hollow.h"

static thread_local const void* stream_of_thread = nullptr;

#define PRODUCT(function)                                  \
    EXPORTED int function(...) {                           \
        hollow::launch_named(#function, stream_of_thread); \
        return 0;                                          \
    }

PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)

EXPORTED int cublasCreate_v2(void** handle) {
    *handle = reinterpret_cast<void*>(1);
    return 0;
}

EXPORTED int cublasDestroy_v2(void*) { return 0; }

EXPORTED int cublasSetStream_v2(void*, void* stream) {
    stream_of_thread = stream;
    return 0;
}

EXPORTED int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
EXPORTED int cublasSetMathMode(void*, int) { return 0; }
EXPORTED int cublasSetPointerMode_v2(void*, int) { return 0; }
EXPORTED int cublasSetSmCountTarget(void*, int) { return 0; }

EXPORTED int cublasGetMathMode(void*, int* mode) {
    *mode = 0;
    return 0;
}

EXPORTED int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return 0;
}

// -- cuBLASLt, with which torch adds biases and multiplies float8

EXPORTED int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                            size_t, void* stream) {
    hollow::launch_named("cublasLtMatmul", stream);
    return 0;
}

struct Heuristic { // cublasLtMatmulHeuristicResult_t; its header needs CUDA's compiler
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* result,
                                            int* count) {
    *result = {};
    *count = 1;
    return 0;
}

// -- cuDNN: torch makes a handle as soon as it has a GPU. Its attention cannot run here: see TORCH_CUDNN_SDPA_DEPRIORITIZED.

EXPORTED int cudnnCreate(void** handle) {
    *handle = reinterpret_cast<void*>(1);
    return 0;
}

EXPORTED int cudnnSetStream(void*, void*) { return 0; }
