// Steps that change a little of much memory, and load and unload a module each: for checkpoints
// that hold what has changed. Every step compares a part of the memory with what it must be, the
// last all of it. Prints a nonce, drawn at its start, with each step, as steps.c does.
// Usage: gpu_blocks STEPS MILLISECONDS [MIB [MODULES]]     MODULES: 1 to load and unload one at
// every step
#include "steps.h"
#include <cuda.h>
#include <dlfcn.h>
#include <string>

constexpr uint32_t BLOCK = 1 << 16; // words

__host__ __device__ inline uint32_t noise(uint32_t index, uint32_t epoch)
{
    uint32_t x = index * 2654435761u ^ epoch * 2246822519u;
    x ^= x >> 15;
    x *= 2246822519u;
    return x ^ x >> 13;
}

__global__ void fill(uint32_t *memory, uint32_t block, uint32_t epoch)
{
    uint32_t i = block * BLOCK + blockIdx.x * blockDim.x + threadIdx.x;
    memory[i] = noise(i, epoch);
}

__global__ void compare(const uint32_t *memory, uint32_t block, uint32_t epoch, uint32_t *wrong)
{
    uint32_t i = block * BLOCK + blockIdx.x * blockDim.x + threadIdx.x;
    if (memory[i] != noise(i, epoch)) atomicAdd(wrong, 1);
}

// By name: nothing is linked but the runtime.
#define LOAD(name) static auto name##_ = (decltype(&name))dlsym(dlopen("libcuda.so.1", RTLD_NOW), #name)

// A module of its own text, whose kernel adds its number.
static void through_a_module(uint32_t number, uint32_t *device, uint32_t *host)
{
    std::string text = ".version 7.0\n.target sm_70\n.address_size 64\n"
                       ".global .u32 kept = " + std::to_string(number) + ";\n"
                       ".visible .entry add(.param .u64 to) { .reg .b64 %a; .reg .b32 %x, %y;\n"
                       "ld.param.u64 %a, [to]; ld.global.u32 %x, [kept]; ld.global.u32 %y, [%a];\n"
                       "add.u32 %x, %x, %y; st.global.u32 [%a], %x; ret; }\n";
    LOAD(cuModuleLoadData);
    LOAD(cuModuleGetFunction);
    LOAD(cuLaunchKernel);
    LOAD(cuModuleUnload);
    CUmodule module;
    CUfunction function;
    DRIVER(cuModuleLoadData_(&module, text.c_str()));
    DRIVER(cuModuleGetFunction_(&function, module, "add"));
    uint32_t before = *host;
    void *parameters[] = {&device};
    DRIVER(cuLaunchKernel_(function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr));
    CUDA(cudaMemcpy(host, device, sizeof *host, cudaMemcpyDeviceToHost));
    if (*host != before + number) std::printf("module %u is wrong\n", number), std::exit(1);
    DRIVER(cuModuleUnload_(module));
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 150);
    uint32_t blocks = (argc > 3 ? atoi(argv[3]) : 32) * 4, modules = argc > 4 ? atoi(argv[4]) : 0;

    uint32_t *memory, *wrong, *sum, last = 0, none = 0;
    CUDA(cudaMalloc(&memory, size_t(blocks) * BLOCK * 4));
    CUDA(cudaMalloc(&wrong, 4));
    CUDA(cudaMalloc(&sum, 4));
    CUDA(cudaMemcpy(wrong, &none, 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(sum, &none, 4, cudaMemcpyHostToDevice));
    std::vector<uint32_t> epochs(blocks, 0);
    for (uint32_t block = 0; block < blocks; block++) fill<<<BLOCK / 256, 256>>>(memory, block, 0);
    for (uint32_t number = 1; number <= steps.count; number++) {
        uint32_t block = number * 7 % blocks, other = number * 13 % blocks;
        epochs[block] = number;
        fill<<<BLOCK / 256, 256>>>(memory, block, number);
        compare<<<BLOCK / 256, 256>>>(memory, other, epochs[other], wrong);
        if (number == steps.count)
            for (uint32_t all = 0; all < blocks; all++)
                compare<<<BLOCK / 256, 256>>>(memory, all, epochs[all], wrong);
        uint32_t found;
        CUDA(cudaMemcpy(&found, wrong, 4, cudaMemcpyDeviceToHost));
        if (found) {
            std::printf("%08x: step %u: %u words are wrong\n", steps.nonce, number, found);
            return 1;
        }
        if (modules) through_a_module(number, sum, &last);
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
