// Asks NVIDIA's management library (NVML) in every step what it was told at the start. Usage:
// gpu_management STEPS MILLISECONDS [cuda]; with `cuda` it uses the device, too. `gpu_management
// facts` prints what does not change, to be compared.
#include "steps.h"
#include <dlfcn.h>
#include <string>
#include <vector>

typedef struct nvmlDevice *Gpu;

static void *library;

template <typename... Args> static unsigned ask(const char *name, Args... args)
{
    auto function = (unsigned (*)(Args...))dlsym(library, name);
    return function ? function(args...) : 13;
}

static std::string text(const char *name, Gpu device)
{
    char room[96] = "";
    unsigned status = ask<Gpu, char *, unsigned>(name, device, room, sizeof room);
    return status ? "status " + std::to_string(status) : room;
}

static std::string number(const char *name, Gpu device)
{
    unsigned value = 0, status = ask<Gpu, unsigned *>(name, device, &value);
    return status ? "status " + std::to_string(status) : std::to_string(value);
}

// What a device is: it stays so.
static std::vector<std::string> facts_of(unsigned index)
{
    Gpu device = nullptr, same = nullptr;
    std::vector<std::string> said = {std::to_string(ask<unsigned, Gpu *>("nvmlDeviceGetHandleByIndex_v2", index, &device))};
    // NVIDIA's own does not ask whether there is a device.
    if (!device) return said;
    for (const char *name : {"nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetSerial", "nvmlDeviceGetVbiosVersion"})
        said.push_back(text(name, device));
    for (const char *name : {"nvmlDeviceGetIndex", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetBrand", "nvmlDeviceGetComputeMode",
                             "nvmlDeviceGetArchitecture", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
                             "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMemoryBusWidth", "nvmlDeviceIsMigDeviceHandle",
                             "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPersistenceMode"})
        said.push_back(number(name, device));
    auto again = ask<const char *, Gpu *>("nvmlDeviceGetHandleByUUID", text("nvmlDeviceGetUUID", device).c_str(), &same);
    said.push_back(again == 0 && same == device ? "found by its UUID" : "not found by its UUID");
    unsigned char pci[68] = {};
    said.push_back(std::to_string(ask<Gpu, void *>("nvmlDeviceGetPciInfo_v3", device, pci)) + " " + (char *)pci + " " + (char *)(pci + 36));
    again = ask<const char *, Gpu *>("nvmlDeviceGetHandleByPciBusId_v2", (char *)pci + 36, &same);
    said.push_back(again == 0 && same == device ? "found by its bus" : "not found by its bus");
    int major = -1, minor = -1;
    ask<Gpu, int *, int *>("nvmlDeviceGetCudaComputeCapability", device, &major, &minor);
    said.push_back(std::to_string(major) + "." + std::to_string(minor));
    unsigned long long memory[3] = {};
    ask<Gpu, void *>("nvmlDeviceGetMemoryInfo", device, memory);
    said.push_back(std::to_string(memory[0]) + " bytes");
    struct { unsigned version; unsigned long long total, reserved, free, used; } second = {40 | 2 << 24};
    unsigned status = ask<Gpu, void *>("nvmlDeviceGetMemoryInfo_v2", device, &second);
    said.push_back(std::to_string(status) + " " + std::to_string(second.total));
    second.version = 17;
    said.push_back(std::to_string(ask<Gpu, void *>("nvmlDeviceGetMemoryInfo_v2", device, &second)));
    for (unsigned index = 0; index < 5; index++) {
        unsigned p2p = 99, status = ask<Gpu, Gpu, unsigned, unsigned *>("nvmlDeviceGetP2PStatus", device, device, index, &p2p);
        said.push_back(std::to_string(status) + " " + std::to_string(p2p));
    }
    for (unsigned link = 0; link < 18; link++) {
        unsigned active = 99, status = ask<Gpu, unsigned, unsigned *>("nvmlDeviceGetNvLinkState", device, link, &active);
        memset(pci, 0, sizeof pci);
        unsigned other = ask<Gpu, unsigned, void *>("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, pci);
        said.push_back(std::to_string(status) + " " + std::to_string(active) + " " + std::to_string(other) + " " + (char *)pci);
    }
    unsigned count = 0;
    status = ask<Gpu, unsigned *, unsigned *>("nvmlDeviceGetSupportedMemoryClocks", device, &count, nullptr);
    std::string clocks = std::to_string(status) + " " + std::to_string(count) + ":";
    std::vector<unsigned> all(count + 4);
    unsigned room = all.size();
    status = ask<Gpu, unsigned *, unsigned *>("nvmlDeviceGetSupportedMemoryClocks", device, &room, all.data());
    for (unsigned i = 0; status == 0 && i < room; i++) clocks += " " + std::to_string(all[i]);
    said.push_back(clocks);
    unsigned long words[4] = {};
    status = ask<Gpu, unsigned, unsigned long *>("nvmlDeviceGetCpuAffinity", device, 4, words);
    said.push_back(std::to_string(status) + " " + std::to_string(words[0]));
    struct { unsigned id, scope; long long when, late; unsigned type, status; unsigned long long value; } fields[2] = {{82}, {150}};
    status = ask<Gpu, int, void *>("nvmlDeviceGetFieldValues", device, 2, fields);
    said.push_back(std::to_string(status) + " " + std::to_string(fields[0].status) + " " + std::to_string(fields[1].status));
    unsigned long long samples[2 * 8];
    unsigned type = 99, some = 8;
    status = ask<Gpu, unsigned, unsigned long long, unsigned *, unsigned *, void *>("nvmlDeviceGetSamples", device, 1, 0, &type, &some, samples);
    said.push_back(std::to_string(status) + " " + std::to_string(type) + " " + std::to_string(some <= 8));
    Gpu near[4] = {};
    count = 4;
    status = ask<Gpu, unsigned, unsigned *, Gpu *>("nvmlDeviceGetTopologyNearestGpus", device, 50, &count, near);
    said.push_back(std::to_string(status) + " " + std::to_string(count) + " " + text("nvmlDeviceGetUUID", near[0]));
    return said;
}

static std::vector<std::string> facts()
{
    unsigned count = 0;
    REQUIRE(ask<unsigned *>("nvmlDeviceGetCount_v2", &count) == 0 && count > 0);
    std::vector<std::string> all = {text("nvmlDeviceGetName", nullptr)};
    char room[96] = "";
    ask<char *, unsigned>("nvmlSystemGetDriverVersion", room, sizeof room);
    all.push_back(room);
    for (unsigned index = 0; index <= count; index++)
        for (auto &fact : facts_of(index)) all.push_back(std::to_string(index) + ": " + fact);
    return all;
}

static int print_facts()
{
    auto words = (const char *(*)(unsigned))dlsym(library, "nvmlErrorString");
    for (unsigned code = 0; code < 32; code++) std::printf("%u: %s\n", code, words(code));
    for (auto &fact : facts()) std::puts(fact.c_str());
    return 0;
}

__global__ void add(unsigned *sum, unsigned amount) { *sum += amount; }

int main(int argc, char **argv)
{
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    REQUIRE(library);
    REQUIRE(ask<unsigned *>("nvmlDeviceGetCount_v2", nullptr) == 1);
    REQUIRE(ask("nvmlInit_v2") == 0);
    if (argc > 1 && std::string(argv[1]) == "facts") return print_facts();
    Steps steps(argc, argv, 100);
    unsigned *sum = nullptr, whole = 0;
    if (argc > 3) CUDA(cudaMallocManaged(&sum, 4));
    if (sum) *sum = 0;
    auto first = facts();
    for (unsigned step = 1; step <= steps.count; step++) {
        REQUIRE(facts() == first);
        if (sum) {
            add<<<1, 1>>>(sum, step);
            CUDA(cudaDeviceSynchronize());
            REQUIRE(*sum == (whole += step));
        }
        steps.done(step);
        steps.rest();
    }
    REQUIRE(ask("nvmlShutdown") == 0);
    return steps.well();
}
