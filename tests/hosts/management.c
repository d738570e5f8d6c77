// Stands for NVIDIA's management library where there is no GPU: two devices, and a function of each
// kind of parameters.
#include <stdio.h>
#include <string.h>

typedef struct { int index; } Device;
static Device devices[2] = {{0}, {1}};
static int started;

static unsigned text(char *out, unsigned length, const char *what) {
    if (!out) return 2;
    if (strlen(what) >= length) return 7;
    strcpy(out, what);
    return 0;
}

unsigned nvmlInit_v2(void) { return started = 1, 0; }
unsigned nvmlShutdown(void) { return started ? started = 0, 0 : 1; }
unsigned nvmlDeviceGetCount_v2(unsigned *count) { return !started ? 1 : count ? *count = 2, 0 : 2; }
unsigned nvmlSystemGetDriverVersion(char *out, unsigned length) { return text(out, length, "1.2.3"); }
unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) { return index < 2 ? *out = devices + index, 0 : 2; }
unsigned nvmlDeviceGetIndex(Device *device, unsigned *out) { return device && out ? *out = device->index, 0 : 2; }
unsigned nvmlDeviceGetName(Device *device, char *out, unsigned length) { return device ? text(out, length, "a device") : 2; }

unsigned nvmlDeviceGetUUID(Device *device, char *out, unsigned length) {
    return device ? text(out, length, device->index ? "GPU-one" : "GPU-zero") : 2;
}

unsigned nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    for (int i = 0; i < 2; i++)
        if (strcmp(uuid, i ? "GPU-one" : "GPU-zero") == 0) return *out = devices + i, 0;
    return 6;
}

unsigned nvmlDeviceGetPciInfo_v3(Device *device, char *out) {
    if (!device) return 2;
    memset(out, 0, 68);
    snprintf(out, 16, "0000:0%d:00.0", device->index);
    snprintf(out + 36, 32, "00000000:0%d:00.0", device->index);
    return 0;
}

unsigned nvmlDeviceGetMemoryInfo_v2(Device *device, unsigned long long *out) {
    if (!device) return 2;
    if ((unsigned)out[0] != (40 | 2 << 24)) return 25;
    return out[1] = 80ull << 30, out[2] = out[4] = 1, out[3] = 79ull << 30, 0;
}

unsigned nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    return device ? *major = 9, *minor = device->index, 0 : 2;
}

unsigned nvmlDeviceGetP2PStatus(Device *a, Device *b, unsigned index, unsigned *out) {
    return a && b && index < 4 ? *out = index, 0 : 2;
}

unsigned nvmlDeviceGetSupportedMemoryClocks(Device *device, unsigned *count, unsigned *clocks) {
    if (!device) return 2;
    unsigned room = *count;
    *count = 3;
    if (room < 3) return 7;
    for (unsigned i = 0; i < 3; i++) clocks[i] = 1000 * i + device->index;
    return 0;
}

unsigned nvmlDeviceGetCpuAffinity(Device *device, unsigned size, unsigned long *words) {
    if (!device) return 2;
    for (unsigned i = 0; i < size; i++) words[i] = i ? 0 : 0xff00ul + device->index;
    return 0;
}

unsigned nvmlDeviceGetFieldValues(Device *device, int count, unsigned *fields) {
    if (!device || count != 2 || fields[0] != 82 || fields[10] != 150) return 2;
    fields[7] = 3, fields[17] = 6;
    return 0;
}

unsigned nvmlDeviceGetSamples(Device *device, unsigned type, unsigned long long since, unsigned *kind, unsigned *count, unsigned long long *samples) {
    if (!device || type != 1 || since || *count != 8) return 2;
    *kind = 4, *count = 2, samples[0] = samples[3] = 5;
    return 0;
}

unsigned nvmlDeviceGetTopologyNearestGpus(Device *device, unsigned level, unsigned *count, Device **out) {
    if (!device || level != 50) return 2;
    return *count = 1, out[0] = devices + !device->index, 0;
}

const char *nvmlErrorString(unsigned code) { return code ? "" : "Success"; }
