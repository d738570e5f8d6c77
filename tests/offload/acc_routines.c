// OpenACC: routines of each level, functions that call themselves, and atomic operations.
// build: -fopenacc -foffload-options=-lm
#include "check.h"
#include <math.h>
#include <openacc.h>

enum { N = 20000, BINS = 64 };

#pragma acc routine seq
static int collatz(unsigned n) {
    int steps = 0;
    for (; n != 1; steps++) n = n % 2 ? 3 * n + 1 : n / 2;
    return steps;
}

#pragma acc routine seq
static int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

#pragma acc routine vector
static void double_all(int *a, int n) {
    #pragma acc loop vector
    for (int i = 0; i < n; i++) a[i] *= 2;
}

#pragma acc routine worker
static void add_all(int *a, int n, int more) {
    #pragma acc loop worker vector
    for (int i = 0; i < n; i++) a[i] += more;
}

#pragma acc routine gang
static void negate_all(int *a, int n) {
    #pragma acc loop gang worker vector
    for (int i = 0; i < n; i++) a[i] = -a[i];
}

static void routines(int *a) {
    #pragma acc parallel loop copyout(a[0:N])
    for (int i = 0; i < N; i++) a[i] = collatz(i + 1) + fibonacci(i & 7);
    for (int i = 0; i < N; i++) SAME(a[i], collatz(i + 1) + fibonacci(i & 7));
    for (int i = 0; i < N; i++) a[i] = i;
    #pragma acc parallel num_gangs(10) num_workers(4) vector_length(32) copy(a[0:N])
    {
        #pragma acc loop gang worker
        for (int block = 0; block < N / 100; block++) double_all(a + block * 100, 100);
    }
    #pragma acc parallel num_gangs(10) num_workers(4) vector_length(32) copy(a[0:N])
    {
        #pragma acc loop gang
        for (int block = 0; block < N / 1000; block++) add_all(a + block * 1000, 1000, block);
    }
    #pragma acc parallel num_gangs(10) num_workers(4) vector_length(32) copy(a[0:N])
    negate_all(a, N);
    for (int i = 0; i < N; i++) SAME(a[i], -(2 * i + i / 1000));
}

static void atomics(const int *a, int *bins, int *order, unsigned char *seen) {
    int count = 0, last = 0;
    float sum = 0;
    double exact = 0;
    for (int b = 0; b < BINS; b++) bins[b] = 0;
    #pragma acc parallel loop copyin(a[0:N]) copy(bins[0:BINS], count, sum, exact, last)           \
        copyout(order[0:N])
    for (int i = 0; i < N; i++) {
        int place;
        #pragma acc atomic update
        bins[a[i] % BINS]++;
        #pragma acc atomic capture
        place = count++;
        order[place] = i;
        #pragma acc atomic
        sum += 0.5f;
        #pragma acc atomic
        exact += a[i];
        #pragma acc atomic write
        last = 9;
    }
    SAME(count, N);
    SAME(sum, N * 0.5);
    SAME(last, 9);
    double exact_ = 0;
    for (int i = 0; i < N; i++) exact_ += a[i], bins[a[i] % BINS]--, seen[i] = 0;
    SAME(exact, exact_);
    for (int b = 0; b < BINS; b++) SAME(bins[b], 0);
    for (int i = 0; i < N; i++) seen[order[i]]++;
    for (int i = 0; i < N; i++) SAME(seen[i], 1);
}

static void mathematics(double *d, float *f) {
    #pragma acc parallel loop copyout(d[0:N], f[0:N])
    for (int i = 0; i < N; i++) {
        double x = (i - N / 2) * 0.001;
        d[i] = sin(x) + exp(x) * sqrt(fabs(x)) + pow(2, x) + log(1 + fabs(x)) + floor(x);
        f[i] = sinf((float)x) + cosf((float)x) + fmaxf((float)x, 1);
    }
    for (int i = 0; i < N; i++) {
        double x = (i - N / 2) * 0.001;
        double expected =
            sin(x) + exp(x) * sqrt(fabs(x)) + pow(2, x) + log(1 + fabs(x)) + floor(x);
        CHECK(fabs(d[i] - expected) <= 1e-12 * (1 + fabs(expected)));
        CHECK(fabsf(f[i] - (sinf((float)x) + cosf((float)x) + fmaxf((float)x, 1))) < 1e-5f);
    }
}

int main(void) {
    CHECK(acc_get_num_devices(acc_device_nvidia) > 0);
    int *a = allocate(N * sizeof *a), *order = allocate(N * sizeof *order), bins[BINS];
    unsigned char *seen = allocate(N);
    double *d = allocate(N * sizeof *d);
    float *f = allocate(N * sizeof *f);
    for (int round = 0; round < 8; round++) {
        routines(a);
        unsigned state = round;
        for (int i = 0; i < N; i++) a[i] = next_random(&state) % 5000;
        atomics(a, bins, order, seen);
        mathematics(d, f);
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok acc_routines\n");
    return 0;
}
