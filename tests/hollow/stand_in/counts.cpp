// Counts what the program asks the GPU for, by kind and name. tests/hollow/counts.py reads it through ctypes.
#include "hollow.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

namespace {

struct Total {
    long times = 0;
    size_t bytes = 0;
};

std::mutex mutex;

std::map<std::pair<std::string, std::string>, Total>& totals() {
    static auto* made = new std::map<std::pair<std::string, std::string>, Total>; // outlives all other destructors
    return *made;
}

} // namespace

namespace hollow {

void count(const char* kind, const std::string& name, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    Total& total = totals()[{kind, name}];
    total.times++;
    total.bytes += bytes;
}

} // namespace hollow

// Forget what was counted.
EXPORTED void hollow_reset() {
    std::lock_guard<std::mutex> lock(mutex);
    totals().clear();
}

// Write a line "kind <tab> name <tab> times <tab> bytes" for everything counted since the last reset.
EXPORTED void hollow_write(const char* path) {
    std::lock_guard<std::mutex> lock(mutex);
    FILE* file = fopen(path, "w");
    for (const auto& [key, total] : totals())
        fprintf(file, "%s\t%s\t%ld\t%zu\n", key.first.c_str(), key.second.c_str(), total.times, total.bytes);
    fclose(file);
}
