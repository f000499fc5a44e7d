// NVML, a library of its own (libnvidia-ml.so.1): torch opens it for expandable segments, and the run's monitor for its
// sensors. The devices are there; the sensors are those of a GPU that does nothing.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 3 }; // nvmlReturn_t

static unsigned device_count() {
    const char* value = getenv("HOLLOW_DEVICES");
    return value ? atoi(value) : 1;
}

static void* handle_of(unsigned long index) { return reinterpret_cast<void*>(index + 1); }

EXPORTED int nvmlInit_v2() { return SUCCESS; }
EXPORTED int nvmlInit() { return SUCCESS; }
EXPORTED int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORTED int nvmlShutdown() { return SUCCESS; }
EXPORTED const char* nvmlErrorString(int error) { return error == SUCCESS ? "Success" : "Not Supported"; }

EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = 13000;
    return SUCCESS;
}

EXPORTED int nvmlSystemGetDriverVersion(char* text, unsigned length) {
    snprintf(text, length, "580.00");
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = device_count();
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    *device = handle_of(index);
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
    *device = handle_of(0);
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetHandleByUUID(const char*, void** device) {
    *device = handle_of(0);
    return SUCCESS;
}

// All zeros: no NVLink fabric across hosts.
EXPORTED int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }

// torch names the other processes on a GPU when it is out of memory: there are none.
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
    *count = 0;
    return SUCCESS;
}

EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* processes) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

// A GPU without work: 0 %.
EXPORTED int nvmlDeviceGetUtilizationRates(void*, unsigned* rates) {
    rates[0] = rates[1] = 0;
    return SUCCESS;
}

#define WITHOUT_SENSOR(function) \
    EXPORTED int function(...) { return NOT_SUPPORTED; }

WITHOUT_SENSOR(nvmlDeviceGetPowerUsage)
WITHOUT_SENSOR(nvmlDeviceGetTemperature)
WITHOUT_SENSOR(nvmlDeviceGetClockInfo)
WITHOUT_SENSOR(nvmlDeviceGetMemoryInfo)
WITHOUT_SENSOR(nvmlDeviceGetMemoryInfo_v2)
WITHOUT_SENSOR(nvmlDeviceGetCurrentClocksThrottleReasons)
WITHOUT_SENSOR(nvmlDeviceGetCurrentClocksEventReasons)
WITHOUT_SENSOR(nvmlDeviceGetTotalEccErrors)
WITHOUT_SENSOR(nvmlDeviceGetNvLinkRemoteDeviceType)
WITHOUT_SENSOR(nvmlDeviceGetNvLinkRemotePciInfo_v2)
