// Stream capture: events, and what CUDA forbids while work is captured into a graph (the CUDA C++ programming guide, "CUDA
// graphs", and the runtime's documentation of cudaStreamBeginCapture and cudaThreadExchangeStreamCaptureMode). A forbidden call
// succeeds here and is named, so that one capture shows all of them; on a GPU the first one fails and ends the capture.
#include "hollow.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

using Progress = std::map<const void*, long>; // work of each captured stream that comes before a point

struct CUevent_st {
    std::chrono::steady_clock::time_point recorded;
    unsigned long long capture = 0; // in which it was recorded last; 0: in none
    Progress before;
};

struct CUgraph_st {
    size_t nodes = 0;
    std::vector<std::pair<const char*, std::string>> read; // host memory that the captured copies read, as it was
};

struct CUgraphExec_st : CUgraph_st {};

namespace {

struct Node {
    const void* stream;
    Progress done; // work of each stream up to this node, itself included
    std::string name;
    size_t bytes;
};

struct Capture {
    unsigned long long id;
    const void* origin; // its first stream
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    std::map<const void*, Progress> streams; // the captured ones, each with what its next work waits for
    cudaGraph_t graph;
    std::vector<Node> nodes;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
Capture* current = nullptr; // torch captures one at a time
unsigned long long last_id = 0;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
void (*listener)(const char*) = nullptr;

bool is_captured(const void* stream) { return current && current->streams.count(stream); }

void merge(Progress& into, const Progress& from) {
    for (auto [stream, times] : from) into[stream] = std::max(into[stream], times);
}

bool comes_before(const Node& first, const Node& second) {
    auto found = second.done.find(first.stream);
    return found != second.done.end() && found->second >= first.done.at(first.stream);
}

constexpr size_t small_message = 4096; // bytes: the numbers of rows of the experts are sent in smaller ones

// Count, of each kernel, the nodes that nothing orders before or after a large message: a GPU may run both at once.
void count_concurrent(const std::vector<Node>& nodes) {
    for (const Node& node : nodes) {
        bool concurrent = std::any_of(nodes.begin(), nodes.end(), [&](const Node& other) {
            bool sends = other.name == "ncclSend" && other.bytes > small_message;
            return sends && !comes_before(node, other) && !comes_before(other, node);
        });
        if (concurrent) hollow::count("concurrent", node.name);
    }
}

} // namespace

namespace hollow {

bool is_capturing(const void* stream) {
    Lock lock(mutex);
    return is_captured(stream);
}

void read_again(const void* pinned, size_t bytes) {
    Lock lock(mutex);
    auto* address = static_cast<const char*>(pinned);
    current->graph->read.emplace_back(address, std::string(address, bytes));
}

void obstacle(const std::string& call) {
    count("obstacle", call);
    if (listener) listener(call.c_str());
}

static bool forbids_unsafe_calls() {
    Lock lock(mutex);
    if (!current || current->mode == cudaStreamCaptureModeRelaxed || mode_of_thread == cudaStreamCaptureModeRelaxed)
        return false;
    bool everywhere = current->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
    return everywhere || current->thread == std::this_thread::get_id();
}

void unsafe_call(const char* call) {
    if (forbids_unsafe_calls()) obstacle(call);
}

void unsafe_call(const char* call, const void* stream) {
    if (is_capturing(stream) || forbids_unsafe_calls()) obstacle(call);
}

void work(const void* stream, const char* kind, const std::string& name, size_t bytes) {
    bool outside = false;
    {
        Lock lock(mutex);
        if (is_captured(stream)) {
            current->streams[stream][stream]++;
            current->graph->nodes++;
            current->nodes.push_back({stream, current->streams[stream], name, bytes});
            count("node", name, bytes);
            return;
        }
        outside = current && mode_of_thread != cudaStreamCaptureModeRelaxed;
    }
    count(kind, name, bytes);
    if (outside) obstacle(std::string("work of a stream that is not captured: ") + name);
}

} // namespace hollow

// -- for tests/hollow/capture.py: a function that is called with each obstacle, in the thread that met it

EXPORTED void hollow_listen(void (*function)(const char*)) { listener = function; }

// -- captures

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Lock lock(mutex);
    if (current || !stream) return cudaErrorStreamCaptureUnsupported;
    current = new Capture{++last_id, stream, mode, std::this_thread::get_id(), {}, new CUgraph_st};
    current->streams[stream];
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    std::vector<std::string> unjoined;
    {
        Lock lock(mutex);
        if (!current || current->origin != stream) return cudaErrorStreamCaptureUnmatched;
        Progress& joined = current->streams[stream];
        for (auto& [other, progress] : current->streams)
            if (joined[other] < progress[other]) unjoined.push_back("cudaStreamEndCapture: a stream was not joined");
        count_concurrent(current->nodes);
        *graph = current->graph;
        delete current;
        current = nullptr;
    }
    for (const std::string& call : unjoined) hollow::obstacle(call);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = hollow::is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                              const cudaGraphEdgeData** edges, size_t* number) {
    Lock lock(mutex);
    bool captured = is_captured(stream);
    *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = captured ? current->id : 0;
    if (graph) *graph = captured ? current->graph : nullptr;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (number) *number = 0;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                         unsigned) {
    return cudaSuccess;
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, mode_of_thread);
    return cudaSuccess;
}

// -- events

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    Lock lock(mutex);
    hollow::count("event", "cudaEventRecord");
    event->recorded = std::chrono::steady_clock::now();
    bool captured = is_captured(stream) && flags != cudaEventRecordExternal;
    event->capture = captured ? current->id : 0;
    event->before = captured ? current->streams[stream] : Progress{};
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    hollow::count("wait", "cudaStreamWaitEvent"); // of the stream, not of the host
    bool captured, of_capture;
    {
        Lock lock(mutex);
        captured = is_captured(stream);
        of_capture = event->capture && current && event->capture == current->id;
        if (of_capture && stream) merge(current->streams[stream], event->before); // so it is captured, too
    }
    if (of_capture && !stream) hollow::obstacle("cudaStreamWaitEvent: the default stream, which cannot be captured");
    if (captured && !of_capture && flags != cudaEventWaitExternal)
        hollow::obstacle("cudaStreamWaitEvent: an event from before the capture");
    if (!captured && event->capture && !of_capture) hollow::obstacle("cudaStreamWaitEvent: an event of a capture that is over");
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->capture) hollow::obstacle("cudaEventQuery: an event of a capture");
    else hollow::unsafe_call("cudaEventQuery");
    return hollow::is_stuck() ? cudaErrorNotReady : cudaSuccess;
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->capture) hollow::obstacle("cudaEventSynchronize: an event of a capture");
    else hollow::unsafe_call("cudaEventSynchronize");
    hollow::count("sync", "cudaEventSynchronize");
    hollow::wait_while_stuck();
    return cudaSuccess;
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (start->capture || end->capture) hollow::obstacle("cudaEventElapsedTime: an event of a capture");
    *milliseconds = std::chrono::duration<float, std::milli>(end->recorded - start->recorded).count();
    return cudaSuccess;
}

// -- graphs, which do nothing when they are launched

EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
    *number = graph->nodes;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = new CUgraphExec_st{*graph};
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    for (const auto& [address, bytes] : executable->read)
        if (!hollow::is_pinned(address) || memcmp(address, bytes.data(), bytes.size()))
            hollow::obstacle("cudaGraphLaunch: host memory that a captured copy reads has changed");
    hollow::launch_named("cudaGraphLaunch", stream);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}

// torch 2.15 ties the life of a generator's state to its graph; the state outlives the process here

EXPORTED cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
    *object = reinterpret_cast<cudaUserObject_t>(1);
    return cudaSuccess;
}

EXPORTED cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
