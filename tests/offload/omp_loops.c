// OpenMP offload: teams, parallel loops of each schedule, simd, collapsed loops, reductions,
// parallel regions inside of target regions.
// build: -fopenmp -foffload-options=-latomic
#include "check.h"
#include <omp.h>

enum { N = 50021, ROWS = 48, COLUMNS = 129, TEAMS = 6 };

static void loops(int *a) {
    #pragma omp target teams distribute parallel for map(from : a[0:N])
    for (int i = 0; i < N; i++) a[i] = 3 * i;
    for (int i = 0; i < N; i++) SAME(a[i], 3 * i);
    #pragma omp target teams distribute parallel for simd num_teams(TEAMS) thread_limit(64)       \
        schedule(static, 7) dist_schedule(static, 100) map(tofrom : a[0:N])
    for (int i = 0; i < N; i++) a[i] += i & 3;
    #pragma omp target parallel for schedule(dynamic, 50) map(tofrom : a[0:N])
    for (int i = 0; i < N; i++) a[i] ^= 1;
    #pragma omp target parallel for schedule(guided) num_threads(5) map(tofrom : a[0:N])
    for (int i = 0; i < N; i++) a[i] += 1;
    #pragma omp target simd map(tofrom : a[0:1000])
    for (int i = 0; i < 1000; i++) a[i] *= 2;
    #pragma omp target map(tofrom : a[0:N])
    for (int i = 1; i < 2000; i++) a[i] = (a[i] + a[i - 1]) & 0xffff;
    int before = 0;
    for (int i = 0; i < N; i++) {
        int expected = ((3 * i + (i & 3)) ^ 1) + 1;
        if (i < 1000) expected *= 2;
        if (i >= 1 && i < 2000) expected = (expected + before) & 0xffff;
        before = expected;
        SAME(a[i], expected);
    }
}

static void shapes(double *m, double *t) {
    #pragma omp target teams distribute parallel for collapse(2) map(from : m[0:ROWS * COLUMNS])
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) m[r * COLUMNS + c] = r + c / 1024.0;
    #pragma omp target teams distribute map(to : m[0:ROWS * COLUMNS]) map(from : t[0:ROWS * COLUMNS])
    for (int r = 0; r < ROWS; r++) {
        #pragma omp parallel for
        for (int c = 0; c < COLUMNS; c++) t[c * ROWS + r] = m[r * COLUMNS + c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) SAME(t[c * ROWS + r], r + c / 1024.0);
}

static void reductions(const int *a) {
    long sum = 10, sum_ = 10;
    int most = -1, least = 1 << 30, all = 1, any = 0;
    unsigned bits = 0, both = ~0u, odd = 0;
    double whole = 0;
    float product = 1, product_ = 1;
    #pragma omp target teams distribute parallel for map(to : a[0:N]) map(tofrom : sum, whole, most, \
        least, all, any, bits, both, odd, product) reduction(+ : sum, whole) reduction(max : most)  \
        reduction(min : least) reduction(&& : all) reduction(|| : any) reduction(| : bits)           \
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
    int most_ = -1, least_ = 1 << 30, all_ = 1, any_ = 0;
    unsigned bits_ = 0, both_ = ~0u, odd_ = 0;
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

// What a team knows of itself, and regions inside of regions.
static void teams(void) {
    int threads[TEAMS] = {0}, masters[TEAMS] = {0}, count = 0, nested = 0;
    #pragma omp target teams num_teams(TEAMS) thread_limit(128)                                    \
        map(tofrom : threads[0:TEAMS], masters[0:TEAMS], count, nested)
    {
        int team = omp_get_team_num();
        if (team == 0) count = omp_get_num_teams();
        int local = 0;
        #pragma omp parallel shared(local)
        {
            #pragma omp atomic
            local++;
            #pragma omp barrier
            #pragma omp master
            masters[team] = omp_get_num_threads();
            #pragma omp parallel
            {
                #pragma omp atomic
                nested += omp_get_num_threads();
            }
        }
        threads[team] = local;
    }
    SAME(count, TEAMS);
    int all = 0;
    for (int t = 0; t < TEAMS; t++) {
        CHECK(threads[t] >= 1);
        SAME(threads[t], masters[t]);
        all += threads[t];
    }
    SAME(nested, all);
}

static void on_the_device(void) {
    int host = 1, devices = -1;
    #pragma omp target map(from : host, devices)
    {
        host = omp_is_initial_device();
        devices = omp_get_num_devices();
    }
    SAME(host, 0);
    CHECK(devices >= 0);
}

int main(void) {
    CHECK(omp_get_num_devices() > 0);
    on_the_device();
    int *a = allocate(N * sizeof *a);
    double *m = allocate(ROWS * COLUMNS * sizeof *m), *t = allocate(ROWS * COLUMNS * sizeof *t);
    for (int round = 0; round < 6; round++) {
        loops(a);
        shapes(m, t);
        unsigned state = round;
        for (int i = 0; i < N; i++) a[i] = next_random(&state) % 1000;
        reductions(a);
        teams();
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok omp_loops\n");
    return 0;
}
