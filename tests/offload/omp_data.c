// OpenMP offload: mapped regions, updates, variables and functions of the device, structures,
// pointers of either side, tasks that depend on each other.
// build: -fopenmp
#include "check.h"
#include <omp.h>
#include <string.h>

enum { N = 30000, BLOCKS = 8 };

#pragma omp declare target
static int offset = 7;
float scale[16] = {1, 2, 3};
static const int primes[] = {2, 3, 5, 7, 11, 13, 17, 19};

static int mixed(int i) { return primes[i & 7] * i + offset; }

// Calls itself, so that it has a stack.
static int ackermann(int m, int n) {
    return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1));
}
#pragma omp end declare target

static void regions(float *x, float *y) {
    for (int i = 0; i < N; i++) x[i] = i, y[i] = 1;
    #pragma omp target data map(to : x[0:N]) map(tofrom : y[0:N])
    {
        CHECK(omp_target_is_present(x, 0));
        for (int step = 0; step < 5; step++) {
            #pragma omp target teams distribute parallel for
            for (int i = 0; i < N; i++) y[i] += 2 * x[i];
        }
        SAME(y[9], 1);
        #pragma omp target update from(y[100:50])
        for (int i = 0; i < 200; i++) SAME(y[i], i >= 100 && i < 150 ? 10 * i + 1 : 1);
        for (int i = 0; i < 50; i++) y[i] = -5;
        #pragma omp target update to(y[0:50])
    }
    for (int i = 0; i < N; i++) SAME(y[i], i < 50 ? -5 : 10.f * i + 1);
    CHECK(!omp_target_is_present(x, 0));
}

static void declared(int *a) {
    offset = 11;
    for (int i = 0; i < 16; i++) scale[i] = i;
    #pragma omp target update to(offset, scale)
    #pragma omp target teams distribute parallel for map(from : a[0:N])
    for (int i = 0; i < N; i++) a[i] = mixed(i) + (int)scale[i & 15];
    for (int i = 0; i < N; i++) SAME(a[i], mixed(i) + (i & 15));
    int deep = 0;
    #pragma omp target map(from : deep)
    {
        offset++;
        deep = ackermann(2, 9);
    }
    SAME(deep, ackermann(2, 9));
    SAME(offset, 11);
    #pragma omp target update from(offset)
    SAME(offset, 12);
}

struct list {
    int n;
    double *cells;
};

static void structures(void) {
    struct list list = {N, allocate(N * sizeof(double))};
    for (int i = 0; i < N; i++) list.cells[i] = i;
    double sum = 0;
    #pragma omp target enter data map(to : list) map(to : list.cells[0:N])
    #pragma omp target teams distribute parallel for map(tofrom : sum) reduction(+ : sum)
    for (int i = 0; i < N; i++) {
        list.cells[i] = list.cells[i] * 2 + list.n;
        sum += list.cells[i];
    }
    #pragma omp target exit data map(from : list.cells[0:N]) map(delete : list)
    for (int i = 0; i < N; i++) SAME(list.cells[i], 2.0 * i + N);
    SAME(sum, (double)N * (N - 1) + (double)N * N);
    free(list.cells);
}

static void pointers(float *x) {
    int device = omp_get_default_device(), host = omp_get_initial_device();
    float *there = omp_target_alloc(N * sizeof *there, device);
    CHECK(there);
    for (int i = 0; i < N; i++) x[i] = i;
    SAME(omp_target_memcpy(there, x, N * sizeof *x, 0, 0, device, host), 0);
    #pragma omp target teams distribute parallel for is_device_ptr(there)
    for (int i = 0; i < N; i++) there[i] += 0.5f;
    memset(x, 0, N * sizeof *x);
    SAME(omp_target_memcpy(x, there, N * sizeof *x / 2, 0, 0, host, device), 0);
    for (int i = 0; i < N; i++) SAME(x[i], i < N / 2 ? i + 0.5f : 0);
    // A rectangle of it.
    size_t volume[] = {10, 20}, to[] = {1, 2}, from[] = {3, 4}, rows[] = {50, 100};
    SAME(omp_target_memcpy_rect(x, there, sizeof *x, 2, volume, to, from, rows, rows, host, device),
         0);
    SAME(x[1 * 100 + 2], 304.5);
    SAME(x[10 * 100 + 21], 1223.5);
    SAME(omp_target_associate_ptr(x, there, N * sizeof *x, 0, device), 0);
    #pragma omp target data use_device_ptr(x)
    { SAME((size_t)x, (size_t)there); }
    #pragma omp target update to(x[0:N])
    #pragma omp target teams distribute parallel for
    for (int i = 0; i < N; i++) x[i] *= 2;
    #pragma omp target update from(x[0:N])
    SAME(x[7], 15);
    SAME(x[1 * 100 + 2], 609);
    SAME(omp_target_disassociate_ptr(x, device), 0);
    omp_target_free(there, device);
}

// Target regions as tasks of the host's, and threads that have some each.
static void tasks(int *a) {
    #pragma omp target enter data map(alloc : a[0:BLOCKS * 1000])
    #pragma omp parallel num_threads(4)
    #pragma omp single
    for (int b = 0; b < BLOCKS; b++) {
        int *block = a + b * 1000;
        #pragma omp target teams distribute parallel for nowait depend(out : block[0])
        for (int i = 0; i < 1000; i++) block[i] = i + b;
        #pragma omp target nowait depend(inout : block[0])
        for (int i = 1; i < 1000; i++) block[i] += block[i - 1];
        #pragma omp target update from(block[0:1000]) nowait depend(inout : block[0])
        #pragma omp task depend(inout : block[0]) firstprivate(block)
        block[0] = block[999];
    }
    for (int b = 0; b < BLOCKS; b++) {
        int sum = 0;
        for (int i = 0; i < 1000; i++) {
            sum += i + b;
            if (i > 0) SAME(a[b * 1000 + i], sum);
        }
        SAME(a[b * 1000], sum);
    }
    #pragma omp target exit data map(delete : a[0:BLOCKS * 1000])
    long sums[4] = {0};
    #pragma omp parallel for num_threads(4)
    for (int t = 0; t < 4; t++) {
        long sum = 0;
        #pragma omp target teams distribute parallel for map(tofrom : sum) reduction(+ : sum)
        for (int i = 0; i < 5000; i++) sum += i * t;
        sums[t] = sum;
    }
    for (int t = 0; t < 4; t++) SAME(sums[t], t * 12497500l);
}

int main(void) {
    CHECK(omp_get_num_devices() > 0);
    float *x = allocate(N * sizeof *x), *y = allocate(N * sizeof *y);
    int *a = allocate(N * sizeof *a);
    for (int round = 0; round < 6; round++) {
        regions(x, y);
        declared(a);
        structures();
        pointers(x);
        tasks(a);
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok omp_data\n");
    return 0;
}
