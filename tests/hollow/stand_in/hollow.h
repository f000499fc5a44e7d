// What the parts of the hollow GPU share. See docs/hollow_gpu.md for what is real on it and what is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace hollow {

// machine.cpp: the GPUs that the settings describe

struct Device {
    const char* architecture;    // as in HOLLOW_ARCHITECTURE
    const char* name;            // as torch and nvidia-smi show it
    int major, minor;            // compute capability
    int multiprocessors;
    int shared_memory_per_block; // bytes, opted in
    int shared_memory;           // bytes per multiprocessor
    int threads;                 // per multiprocessor
    int l2_cache;                // bytes
    int clock, memory_clock;     // kHz
    int bus_width;               // bits
    double memory;               // GiB that torch shows as total_memory
};

const Device& device();       // all GPUs of the machine are alike
int device_count();           // HOLLOW_DEVICES
size_t capacity();            // bytes of one GPU, HOLLOW_GIB
size_t usable_capacity();     // without what a CUDA context takes
int attribute(int attribute); // cudaDeviceAttr and CUdevice_attribute have the same numbers
bool is_stuck();              // HOLLOW_STUCK: whether the work of this rank's GPU never ends
void wait_while_stuck();

// counts.cpp: what the program asked the GPU for

void count(const char* kind, const std::string& name, size_t bytes = 0);

// capture.cpp: stream capture, and what it forbids. Streams and events are those of the runtime.

void work(const void* stream, const char* kind, const std::string& name, size_t bytes = 0); // counted; a node if captured
bool is_capturing(const void* stream);
void read_again(const void* pinned, size_t bytes); // by each replay, at this address: the bytes must stay as they are
void obstacle(const std::string& call);           // what a capture forbids: counted, and told to the listener
void unsafe_call(const char* call);               // an obstacle while a capture is under way that forbids it
void unsafe_call(const char* call, const void* stream); // the same, and always if the stream is captured

// memory.cpp: address space without pages, and the few bytes in it that are known

constexpr size_t REMEMBERED = 64; // bytes of the longest piece of device memory whose contents are known

void* allocate(size_t bytes);     // nullptr: out of memory
void release(void* address);
bool take_capacity(size_t bytes); // for memory that has no address yet; false: out of memory
void give_capacity(size_t bytes);
void add_address_range(void* address, size_t bytes);
void remove_address_range(void* address);
bool is_on_device(const void* address);
bool is_pinned(const void* address); // on the host

void remember(const void* address, const std::string& contents);
bool recall(const void* address, size_t bytes, std::string* contents); // false: not known
void remember_message(const void* address, const std::string& file, size_t bytes); // its contents are those of a file
void forget_all();

// messages.cpp: short messages between the processes of a job, as files in HOLLOW_FOLDER

std::string message_file(const std::string& communicator, int sender, int receiver, long number); // "": no folder
void send_message(const std::string& file, const std::string& contents);
std::string receive_message(const std::string& file); // waits for it

// kernels.cpp: names of kernels by their handle, and their launches

void name_kernel(const void* handle, const std::string& name);
void launch(const void* handle, void** arguments, const void* stream);
void launch_named(const std::string& name, const void* stream); // of a library that is hollow as a whole

} // namespace hollow
