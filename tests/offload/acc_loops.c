// OpenACC: parallel and kernels regions, each level of parallelism, collapsed loops, private
// arrays, reductions of each operator.
// build: -fopenacc
#include "check.h"
#include <openacc.h>

enum { N = 100003, ROWS = 61, COLUMNS = 173 };

static void levels(int *a) {
    #pragma acc parallel loop gang worker vector copyout(a[0:N])
    for (int i = 0; i < N; i++) a[i] = 3 * i;
    for (int i = 0; i < N; i++) SAME(a[i], 3 * i);

    #pragma acc parallel num_gangs(7) num_workers(4) vector_length(32) copy(a[0:N])
    {
        #pragma acc loop gang
        for (int block = 0; block < N; block += 1000) {
            int end = block + 1000 < N ? block + 1000 : N;
            #pragma acc loop worker
            for (int row = block; row < end; row += 100) {
                int last = row + 100 < end ? row + 100 : end;
                #pragma acc loop vector
                for (int i = row; i < last; i++) a[i] += block + row;
            }
        }
    }
    for (int i = 0; i < N; i++) SAME(a[i], 3 * i + i / 1000 * 1000 + i / 100 * 100);

    #pragma acc kernels copy(a[0:N])
    for (int i = 0; i < N; i++) a[i] = a[i] ^ i;
    for (int i = 0; i < N; i++) SAME(a[i], (3 * i + i / 1000 * 1000 + i / 100 * 100) ^ i);

    #pragma acc serial copy(a[0:N])
    for (int i = 1; i < N; i++) a[i] = (a[i] + a[i - 1]) & 0xffff;
    #pragma acc parallel loop vector_length(128) if (a[0] >= 0) copy(a[0:N])
    for (int i = 0; i < N; i++) a[i] = -a[i];
    int sum = 0;
    for (int i = 0; i < N; i++) {
        sum = (sum + ((3 * i + i / 1000 * 1000 + i / 100 * 100) ^ i)) & 0xffff;
        SAME(a[i], -sum);
    }
}

static void shapes(double *m, double *t) {
    #pragma acc data copyout(m[0:ROWS * COLUMNS], t[0:ROWS * COLUMNS])
    {
        #pragma acc parallel loop collapse(2)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++) m[r * COLUMNS + c] = r + c / 1024.0;
        #pragma acc parallel loop gang
        for (int r = 0; r < ROWS; r++) {
            #pragma acc loop vector
            for (int c = 0; c < COLUMNS; c++) t[c * ROWS + r] = m[r * COLUMNS + c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) {
            SAME(m[r * COLUMNS + c], r + c / 1024.0);
            SAME(t[c * ROWS + r], r + c / 1024.0);
        }
}

static void private_arrays(int *a) {
    int table[8];
    for (int i = 0; i < 8; i++) table[i] = i * i;
    int first = 5;
    #pragma acc parallel loop gang vector private(first) firstprivate(table) copyout(a[0:N])
    for (int i = 0; i < N; i++) {
        int mine[4];
        for (int k = 0; k < 4; k++) mine[k] = table[(i + k) & 7];
        first = mine[i & 3];
        a[i] = first + mine[0];
    }
    for (int i = 0; i < N; i++)
        SAME(a[i], ((i + (i & 3)) & 7) * ((i + (i & 3)) & 7) + (i & 7) * (i & 7));
    SAME(first, 5);
}

static void reductions(const int *a) {
    long sum = 10;
    int most = -1, least = 1 << 30, all = 1, any = 0;
    unsigned bits = 0, both = ~0u, odd = 0;
    double whole = 0;
    float product = 1;
    #pragma acc parallel loop copyin(a[0:N]) reduction(+ : sum, whole) reduction(max : most)        \
        reduction(min : least) reduction(&& : all) reduction(|| : any) reduction(| : bits)          \
        reduction(& : both) reduction(^ : odd) reduction(* : product)
    for (int i = 0; i < N; i++) {
        sum += a[i];
        whole += a[i] * 0.5;
        most = a[i] > most ? a[i] : most;
        least = a[i] < least ? a[i] : least;
        all = all && a[i] >= 0;
        any = any || a[i] == 77;
        bits |= a[i];
        both &= a[i] | 4;
        odd ^= a[i];
        product *= i % 10007 == 3 ? 2 : 1;
    }
    long sum_ = 10;
    int most_ = -1, least_ = 1 << 30, all_ = 1, any_ = 0;
    unsigned bits_ = 0, both_ = ~0u, odd_ = 0;
    float product_ = 1;
    for (int i = 0; i < N; i++) {
        sum_ += a[i];
        most_ = a[i] > most_ ? a[i] : most_;
        least_ = a[i] < least_ ? a[i] : least_;
        all_ = all_ && a[i] >= 0;
        any_ = any_ || a[i] == 77;
        bits_ |= a[i];
        both_ &= a[i] | 4;
        odd_ ^= a[i];
        product_ *= i % 10007 == 3 ? 2 : 1;
    }
    SAME(sum, sum_);
    SAME(whole, (sum_ - 10) * 0.5);
    SAME(most, most_);
    SAME(least, least_);
    SAME(all, all_);
    SAME(any, any_);
    SAME(bits, bits_);
    SAME(both, both_);
    SAME(odd, odd_);
    SAME(product, product_);
    printf("sum %ld, product %g\n", sum, product);
}

// Of each row, by the workers and vectors of a gang.
static void rows(const int *a, long *sums) {
    #pragma acc parallel loop gang num_workers(8) vector_length(32) copyin(a[0:N])                  \
        copyout(sums[0:ROWS])
    for (int r = 0; r < ROWS; r++) {
        long sum = 0;
        #pragma acc loop worker vector reduction(+ : sum)
        for (int i = r; i < N; i += ROWS) sum += a[i];
        sums[r] = sum;
    }
    for (int r = 0; r < ROWS; r++) {
        long sum = 0;
        for (int i = r; i < N; i += ROWS) sum += a[i];
        SAME(sums[r], sum);
    }
}

int main(void) {
    CHECK(acc_get_num_devices(acc_device_nvidia) > 0);
    int host = 1;
    #pragma acc parallel copy(host)
    host = acc_on_device(acc_device_host);
    SAME(host, 0);
    int *a = allocate(N * sizeof *a);
    double *m = allocate(ROWS * COLUMNS * sizeof *m), *t = allocate(ROWS * COLUMNS * sizeof *t);
    long *sums = allocate(ROWS * sizeof *sums);
    for (int round = 0; round < 8; round++) {
        levels(a);
        shapes(m, t);
        private_arrays(a);
        unsigned state = round;
        for (int i = 0; i < N; i++) a[i] = next_random(&state) % 1000;
        reductions(a);
        rows(a, sums);
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok acc_loops\n");
    return 0;
}
