// OpenACC: structured and unstructured data, updates of parts, queues that wait for each other,
// pointers of either side, variables of the device.
// build: -fopenacc
#include "check.h"
#include <openacc.h>
#include <string.h>

enum { N = 40000, QUEUES = 6 };

float scale[16];
#pragma acc declare create(scale)

static void regions(float *x, float *y) {
    for (int i = 0; i < N; i++) x[i] = i, y[i] = 1;
    #pragma acc data copyin(x[0:N]) copy(y[0:N])
    {
        CHECK(acc_is_present(x, N * sizeof *x));
        for (int step = 0; step < 5; step++) {
            #pragma acc parallel loop present(x[0:N], y[0:N])
            for (int i = 0; i < N; i++) y[i] += 2 * x[i];
        }
        // The host has what it had; a part of it is brought back and a part sent.
        SAME(y[9], 1);
        #pragma acc update self(y[100:50])
        for (int i = 0; i < 200; i++) SAME(y[i], i >= 100 && i < 150 ? 10 * i + 1 : 1);
        for (int i = 0; i < 50; i++) y[i] = -5;
        #pragma acc update device(y[0:50])
    }
    for (int i = 0; i < N; i++) SAME(y[i], i < 50 ? -5 : 10.f * i + 1);
    CHECK(!acc_is_present(x, N * sizeof *x));
}

struct grid {
    int n;
    double *cells;
};

static void unstructured(void) {
    struct grid grid = {N, allocate(N * sizeof(double))};
    for (int i = 0; i < N; i++) grid.cells[i] = i;
    #pragma acc enter data copyin(grid)
    #pragma acc enter data copyin(grid.cells[0:N])
    #pragma acc parallel loop present(grid)
    for (int i = 0; i < grid.n; i++) grid.cells[i] = grid.cells[i] * 2 + grid.n;
    #pragma acc exit data copyout(grid.cells[0:N])
    #pragma acc exit data delete(grid)
    for (int i = 0; i < N; i++) SAME(grid.cells[i], 2.0 * i + N);
    free(grid.cells);
}

static void pointers(float *x) {
    float *there = acc_malloc(N * sizeof *there);
    CHECK(there);
    for (int i = 0; i < N; i++) x[i] = i;
    acc_memcpy_to_device(there, x, N * sizeof *x);
    #pragma acc parallel loop deviceptr(there)
    for (int i = 0; i < N; i++) there[i] += 0.5f;
    memset(x, 0, N * sizeof *x);
    acc_memcpy_from_device(x, there, N * sizeof *x);
    for (int i = 0; i < N; i++) SAME(x[i], i + 0.5f);
    acc_map_data(x, there, N * sizeof *x);
    SAME((size_t)acc_deviceptr(x), (size_t)there);
    #pragma acc parallel loop present(x[0:N])
    for (int i = 0; i < N; i++) x[i] *= 2;
    #pragma acc update self(x[0:N])
    for (int i = 0; i < N; i++) SAME(x[i], 2 * i + 1);
    #pragma acc host_data use_device(x)
    { SAME((size_t)x, (size_t)there); }
    acc_unmap_data(x);
    acc_free(there);
}

static void queues(int *a) {
    for (int i = 0; i < QUEUES * N; i++) a[i] = i;
    #pragma acc enter data create(a[0:QUEUES * N])
    for (int q = 0; q < QUEUES; q++) {
        #pragma acc update device(a[q * N:N]) async(q)
        #pragma acc parallel loop present(a[0:QUEUES * N]) async(q)
        for (int i = q * N; i < (q + 1) * N; i++) a[i] = a[i] * 2 + q;
    }
    // One takes over what the others have made.
    #pragma acc parallel loop present(a[0:QUEUES * N]) wait(0, 1, 2, 3, 4, 5) async(7)
    for (int i = 0; i < N; i++)
        for (int q = 1; q < QUEUES; q++) a[i] += a[q * N + i];
    #pragma acc wait(7) async(3)
    #pragma acc update self(a[0:QUEUES * N]) async(3)
    acc_wait(3);
    CHECK(acc_async_test(3));
    #pragma acc wait
    CHECK(acc_async_test_all());
    for (int i = 0; i < N; i++) {
        int sum = 0;
        for (int q = 0; q < QUEUES; q++) sum += (q * N + i) * 2 + q;
        SAME(a[i], sum);
    }
    #pragma acc exit data delete(a)
}

// gcc 12 leaves such variables out of update directives.
static void declared(float *x) {
    for (int i = 0; i < 16; i++) scale[i] = 1 + i * 0.25f;
    acc_update_device(scale, sizeof scale);
    for (int i = 0; i < 16; i++) scale[i] = 0;
    #pragma acc parallel loop copyout(x[0:N])
    for (int i = 0; i < N; i++) x[i] = i * scale[i & 15];
    for (int i = 0; i < N; i++) SAME(x[i], i * (1 + (i & 15) * 0.25f));
    #pragma acc parallel loop
    for (int i = 0; i < 16; i++) scale[i] = scale[i] + 1;
    acc_update_self(scale, sizeof scale);
    for (int i = 0; i < 16; i++) SAME(scale[i], 2 + i * 0.25f);
}

int main(void) {
    CHECK(acc_get_num_devices(acc_device_nvidia) > 0);
    SAME(acc_get_device_type(), acc_device_nvidia);
    float *x = allocate(N * sizeof *x), *y = allocate(N * sizeof *y);
    int *a = allocate(QUEUES * N * sizeof *a);
    for (int round = 0; round < 12; round++) {
        regions(x, y);
        unstructured();
        pointers(x);
        queues(a);
        declared(x);
        printf("round %d\n", round);
        fflush(stdout);
    }
    CHECK(acc_get_property(0, acc_device_nvidia, acc_property_memory) > 0);
    printf("ok acc_data\n");
    return 0;
}
