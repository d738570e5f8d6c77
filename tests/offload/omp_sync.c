// OpenMP offload: atomic operations of each kind, critical sections, locks, ordered loops,
// sections, and tasks on the device.
// build: -fopenmp -foffload-options=-latomic
#include "check.h"
#include <omp.h>

enum { N = 4000, BINS = 32, TEAMS = 5 };

static void atomics(void) {
    int bins[BINS] = {0}, count = 0, most = -1, swapped = 0, seen = 0, order[N];
    unsigned char small[4] = {0};
    long wide = 0;
    float single = 0;
    double whole = 0;
    #pragma omp target teams distribute parallel for map(tofrom : bins, count, most, swapped, seen,  \
        order, small, wide, single, whole)
    for (int i = 0; i < N; i++) {
        int place;
        #pragma omp atomic
        bins[i % BINS] += i;
        #pragma omp atomic capture
        place = count++;
        order[place] = i;
        #pragma omp atomic
        small[i & 3]++;
        #pragma omp atomic
        wide += 1000000007l;
        #pragma omp atomic
        single += 0.25f;
        #pragma omp atomic
        whole += i;
        #pragma omp atomic compare
        if (most < i) { most = i; }
        #pragma omp atomic write
        swapped = 3;
        int last;
        #pragma omp atomic read
        last = count;
        #pragma omp atomic
        seen |= last;
    }
    SAME(count, N);
    SAME(most, N - 1);
    SAME(wide, N * 1000000007l);
    SAME(single, N * 0.25);
    SAME(whole, N / 2.0 * (N - 1));
    SAME(swapped, 3);
    CHECK(seen != 0);
    for (int k = 0; k < 4; k++) SAME(small[k], (unsigned char)(N / 4));
    int found[N] = {0};
    for (int i = 0; i < N; i++) found[order[i]]++, bins[i % BINS] -= i;
    for (int i = 0; i < N; i++) SAME(found[i], 1);
    for (int b = 0; b < BINS; b++) SAME(bins[b], 0);
}

// Threads of a team, one at a time.
static void exclusive(void) {
    int count = 0, named = 0, locked = 0, sorted = 1, last = -1;
    #pragma omp target map(tofrom : count, named, locked, sorted, last)
    {
        omp_lock_t lock;
        omp_init_lock(&lock);
        #pragma omp parallel for num_threads(8)
        for (int i = 0; i < 400; i++) {
            #pragma omp critical
            count++;
            #pragma omp critical(other)
            named += 2;
            omp_set_lock(&lock);
            locked += 3;
            omp_unset_lock(&lock);
        }
        omp_destroy_lock(&lock);
        #pragma omp parallel for ordered num_threads(4) schedule(static, 1)
        for (int i = 0; i < 64; i++) {
            #pragma omp ordered
            {
                sorted &= i == last + 1;
                last = i;
            }
        }
    }
    SAME(count, 400);
    SAME(named, 800);
    SAME(locked, 1200);
    SAME(sorted, 1);
    SAME(last, 63);
}

static void work_sharing(void) {
    int part[4] = {0}, once = 0, copies = 0, masters = 0;
    #pragma omp target map(tofrom : part, once, copies, masters)
    #pragma omp parallel num_threads(8)
    {
        int mine = 0;
        #pragma omp sections
        {
            #pragma omp section
            part[0] = 1;
            #pragma omp section
            part[1] = 2;
            #pragma omp section
            part[2] = 3;
        }
        #pragma omp single copyprivate(mine)
        {
            once++;
            mine = 5;
        }
        #pragma omp atomic
        copies += mine == 5;
        #pragma omp master
        masters++;
        #pragma omp barrier
        #pragma omp single nowait
        part[3] = copies;
    }
    SAME(part[0] + part[1] + part[2], 6);
    SAME(once, 1);
    SAME(masters, 1);
    CHECK(copies >= 1);
    SAME(part[3], copies);
}

#pragma omp declare target
static int fibonacci(int n) {
    if (n < 2) return n;
    int a, b;
    #pragma omp task shared(a)
    a = fibonacci(n - 1);
    #pragma omp task shared(b)
    b = fibonacci(n - 2);
    #pragma omp taskwait
    return a + b;
}
#pragma omp end declare target

static void tasks(void) {
    int result = 0, loop = 0, depends = 0;
    #pragma omp target map(tofrom : result, loop, depends)
    #pragma omp parallel num_threads(4)
    #pragma omp single
    {
        result = fibonacci(9);
        #pragma omp taskloop grainsize(10) shared(loop)
        for (int i = 0; i < 100; i++) {
            #pragma omp atomic
            loop += i;
        }
        #pragma omp task depend(out : depends) shared(depends)
        depends = 1;
        #pragma omp task depend(inout : depends) shared(depends)
        depends = depends * 10 + 2;
        #pragma omp taskwait
    }
    SAME(result, 34);
    SAME(loop, 4950);
    SAME(depends, 12);
}

int main(void) {
    CHECK(omp_get_num_devices() > 0);
    for (int round = 0; round < 6; round++) {
        atomics();
        exclusive();
        work_sharing();
        tasks();
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok omp_sync\n");
    return 0;
}
