// What the driver answers about memory: ranges, kinds of pointers, what it refuses, what is free.
// build: {cuda}
#include "check.h"
#include <cstring>
#include <cuda.h>

// A driver API call that must fail with exactly this error.
#define REFUSED(error, call) REQUIRE((call) == (error))

template <typename T> static T ask(CUpointer_attribute attribute, CUdeviceptr at)
{
    T value;
    std::memset(&value, 0xee, sizeof value);
    DRIVER(cuPointerGetAttribute(&value, attribute, at));
    return value;
}

static void device_memory()
{
    const size_t bytes = 3 << 20;
    CUdeviceptr a, base;
    size_t size, total, before, after;
    DRIVER(cuMemGetInfo(&before, &total));
    DRIVER(cuMemAlloc(&a, bytes));
    DRIVER(cuMemGetInfo(&after, &total));
    REQUIRE(before - after >= bytes && a % 256 == 0);
    DRIVER(cuMemGetAddressRange(&base, &size, a + 100));
    REQUIRE(base == a && size == bytes);
    REQUIRE(ask<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a + 7) == CU_MEMORYTYPE_DEVICE);
    REQUIRE(ask<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, a) == 0);
    REQUIRE(ask<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, a + 7) == a);
    REQUIRE(ask<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, a + 7) == bytes);
    void *host;
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, a));
    std::vector<char> data(bytes + 4096);
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD((CUdeviceptr)data.data(), data.data(), 8));
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(data.data(), 0x1234, 8));
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemFree(a + 512));
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&base, 0));
    REFUSED(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&base, total + 1));
    DRIVER(cuMemFree(a));
    DRIVER(cuMemFree(0));
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemFree(a));
}

static void host_memory()
{
    char *p;
    CUdeviceptr at;
    DRIVER(cuMemHostAlloc((void **)&p, 5000, CU_MEMHOSTALLOC_PORTABLE));
    DRIVER(cuMemHostGetDevicePointer(&at, p + 8, 0));
    REQUIRE(at == (CUdeviceptr)p + 8);
    REQUIRE(ask<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == CU_MEMORYTYPE_HOST);
    REQUIRE(ask<char *>(CU_POINTER_ATTRIBUTE_HOST_POINTER, at) == p + 8);
    unsigned flags;
    DRIVER(cuMemHostGetFlags(&flags, p));
    REQUIRE(flags & CU_MEMHOSTALLOC_PORTABLE);
    DRIVER(cuMemFreeHost(p));
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(p));

    CUdeviceptr managed;
    DRIVER(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
    REQUIRE(ask<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, managed) == 1);
    DRIVER(cuMemFree(managed));

    // Memory that CUDA does not know: an error for one attribute, nothing for several.
    unsigned kind = 9, is_managed = 9;
    char mine[16];
    REFUSED(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)mine));
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED};
    void *values[] = {&kind, &is_managed};
    DRIVER(cuPointerGetAttributes(2, attributes, values, (CUdeviceptr)mine));
    REQUIRE(kind == 0 && is_managed == 0);
}

// Two registered ranges that share a page: each ends by itself.
static void registered_neighbours()
{
    std::vector<unsigned char> memory(64 << 10), copy;
    for (size_t i = 0; i < memory.size(); i++) memory[i] = (unsigned char)(i * 7);
    copy = memory;
    unsigned char *a = memory.data() + 100, *b = a + 10000;
    DRIVER(cuMemHostRegister(a, 10000, CU_MEMHOSTREGISTER_DEVICEMAP));
    DRIVER(cuMemHostRegister(b, 20000, CU_MEMHOSTREGISTER_DEVICEMAP));
    REFUSED(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(a + 50, 10, 0));
    REQUIRE(memory == copy);
    CUdeviceptr da, db;
    DRIVER(cuMemHostGetDevicePointer(&da, a, 0));
    DRIVER(cuMemHostGetDevicePointer(&db, b, 0));
    DRIVER(cuMemsetD8(da + 9990, 1, 10));
    DRIVER(cuMemsetD8(db, 2, 10));
    DRIVER(cuCtxSynchronize());
    REQUIRE(a[9989] == copy[100 + 9989] && a[9999] == 1 && b[0] == 2 && b[10] == copy[10110]);
    DRIVER(cuMemHostUnregister(a));
    REFUSED(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(a));
    REQUIRE(a[9999] == 1 && b[0] == 2);
    a[9999] = 3;
    DRIVER(cuMemsetD8(db + 1, 4, 1));
    DRIVER(cuCtxSynchronize());
    REQUIRE(a[9999] == 3 && b[1] == 4);
    DRIVER(cuMemHostUnregister(b));
    REQUIRE(b[1] == 4 && b[19999] == copy[100 + 29999]);
}

int main()
{
    CUdevice device;
    CUcontext context;
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    device_memory();
    host_memory();
    registered_neighbours();
    OK("device, host and registered memory");
}
