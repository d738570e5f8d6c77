// A linker in small: offers relocatable cubins and their PTX to the driver's compile cache, as
// nvJitLink does (`PTX CUBIN`, any number), then loads cubins that were linked of them
// (`-- LINKED`, any number) and prints of each what its kernel leaves and how many registers that
// has.
#include "../programs/check.h"
#include <cuda.h>
#include <cstring>
#include <fstream>
#include <iterator>

static std::vector<char> read(const char *path)
{
    std::ifstream file(path, std::ios::binary);
    REQUIRE(file);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct CompileCache {
    size_t size;
    CUresult (*open)(size_t *handle, unsigned kind, const char *input, size_t len);
    CUresult (*close)(size_t handle);
    CUresult (*look_up)(size_t handle);
    CUresult (*store)(size_t handle, size_t unknown, const char *made, size_t len);
};

static void offer(const CompileCache *cache, const char *text, const char *made)
{
    std::vector<char> ptx = read(text), cubin = read(made);
    size_t handle;
    DRIVER(cache->open(&handle, 1, ptx.data(), ptx.size()));
    REQUIRE(cache->look_up(handle) == CUDA_ERROR_NOT_FOUND);
    DRIVER(cache->store(handle, 0, cubin.data(), cubin.size()));
    DRIVER(cache->close(handle));
}

static void run(CUmodule module)
{
    CUfunction kernel;
    CUdeviceptr out;
    int got = -1, registers;
    DRIVER(cuModuleGetFunction(&kernel, module, "foo"));
    DRIVER(cuMemAlloc(&out, sizeof got));
    void *args[] = {&out};
    DRIVER(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, args, nullptr));
    DRIVER(cuMemcpyDtoH(&got, out, sizeof got));
    DRIVER(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel));
    DRIVER(cuModuleUnload(module));
    std::printf("%d %d\n", got, registers);
}

int main(int count, char **words)
{
    CUdevice device;
    CUcontext context;
    const void *table;
    const unsigned char name[16] = {0xda, 0x91, 0x51, 0xd3, 0x3a, 0xe6, 0xcc, 0x41,
                                    0xa5, 0xc0, 0x4f, 0x26, 0xd5, 0x33, 0xe3, 0x28};
    CUuuid id;
    std::memcpy(&id, name, sizeof name);
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    DRIVER(cuGetExportTable(&table, &id));
    int at = 1;
    for (; at + 1 < count && std::strcmp(words[at], "--"); at += 2)
        offer(static_cast<const CompileCache *>(table), words[at], words[at + 1]);
    for (at++; at < count; at++) {
        std::vector<char> cubin = read(words[at]);
        CUmodule module;
        CUresult status = cuModuleLoadData(&module, cubin.data());
        if (status == CUDA_SUCCESS) run(module);
        else std::printf("refused %d\n", (int)status);
    }
}
