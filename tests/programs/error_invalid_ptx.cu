// Invalid and unusable modules are refused by the load itself, with a log, and nothing sticks.
// build: {cuda}
#include "check.h"
#include <cstring>
#include <cuda.h>

int main()
{
    CUDA(cudaFree(nullptr));
    CUmodule module;
    char log[4096] = "";
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    const char *bad = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k() {\n  add.u32 %r1, oops;\n}\n";
    CUresult status = cuModuleLoadDataEx(&module, bad, 2, options, values);
    REQUIRE(status == CUDA_ERROR_INVALID_PTX);
    REQUIRE(strlen(log) > 0);
    status = cuModuleLoadData(&module, "this is no module at all");
    REQUIRE(status == CUDA_ERROR_INVALID_IMAGE || status == CUDA_ERROR_INVALID_PTX);
    status = cuModuleLoad(&module, "/nonexistent/file.ptx");
    REQUIRE(status == CUDA_ERROR_FILE_NOT_FOUND);
    CUDA(cudaDeviceSynchronize());
    Device<int> d(16);
    CUDA(cudaMemset(d, 0, 64));
    OK("three refusals");
}
