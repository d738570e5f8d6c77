// Modules that come and go in no order; the variables of those that stay keep their addresses and
// contents.
// build: {cuda}
#include "check.h"
#include <cuda.h>
#include <map>
#include <string>
#include <unistd.h>

struct Module {
    CUmodule module;
    CUdeviceptr at;
    size_t bytes;
    unsigned word;
};

static const size_t SIZES[] = {4, 256, 5000, 60000, 1 << 20, (2 << 20) + 4, 3 << 20, 6 << 20};

static std::string text(size_t bytes, unsigned kind)
{
    // Constants, variables with values and without.
    std::string variable = kind == 0 && bytes <= 60000 ? ".const" : ".global";
    std::string value = kind == 1 ? " = {1, 2, 3}" : "";
    return ".version 7.0\n.target sm_70\n.address_size 64\n.visible " + variable + " .align 8 .b8 room[" + std::to_string(bytes) + "]" + value + ";\n";
}

static Module load(size_t bytes, unsigned kind, unsigned word)
{
    Module made{nullptr, 0, 0, word};
    DRIVER(cuModuleLoadData(&made.module, text(bytes, kind).c_str()));
    DRIVER(cuModuleGetGlobal(&made.at, &made.bytes, made.module, "room"));
    REQUIRE(made.bytes == bytes);
    DRIVER(cuMemcpyHtoD(made.at, &word, 4));
    DRIVER(cuMemcpyHtoD(made.at + bytes / 4 * 4 - 4, &word, 4));
    return made;
}

static void look(const Module &module)
{
    CUdeviceptr at;
    size_t bytes;
    unsigned first, last;
    DRIVER(cuModuleGetGlobal(&at, &bytes, module.module, "room"));
    REQUIRE(at == module.at && bytes == module.bytes);
    DRIVER(cuMemcpyDtoH(&first, at, 4));
    DRIVER(cuMemcpyDtoH(&last, at + bytes / 4 * 4 - 4, 4));
    REQUIRE(first == module.word && last == module.word);
}

int main()
{
    DRIVER(cuInit(0));
    CUdevice device;
    CUcontext context;
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    Random random(11);
    std::map<unsigned, Module> all;
    for (unsigned step = 1; step <= 200; step++) {
        all[step] = load(SIZES[random.below(8)], random.below(3), step);
        // Some twelve stay.
        if (all.size() > 12 || random.below(8) == 0) {
            auto gone = std::next(all.begin(), random.below(all.size()));
            DRIVER(cuModuleUnload(gone->second.module));
            all.erase(gone);
        }
        for (const auto &one : all) look(one.second);
        usleep(5000);
    }
    OK("%zu modules are left", all.size());
}
