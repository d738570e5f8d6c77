// OpenMP offload: what the device has of C's library: printf, malloc, strings, mathematics.
// build: -fopenmp -foffload-options=-lm
#include "check.h"
#include <math.h>
#include <omp.h>
#include <string.h>

enum { N = 4000, THREADS = 8 };

static void prints(int round) {
    fflush(stdout);
    #pragma omp target
    {
        printf("device says %d %s %c %5.2f %x %ld\n", round, "text", 'c', round * 0.5, 255,
               1l << 40);
        puts("a line");
        printf(".");
        printf("\n");
    }
}

struct node {
    struct node *next;
    int value;
};

// Each thread has a list of its own on the device's heap.
static void heap(void) {
    long sums[THREADS] = {0};
    int nulls = 0;
    #pragma omp target parallel for num_threads(THREADS) map(tofrom : sums, nulls)
    for (int t = 0; t < THREADS; t++) {
        struct node *list = NULL;
        for (int i = 0; i < 50; i++) {
            struct node *node = malloc(sizeof *node);
            if (!node) {
                #pragma omp atomic
                nulls++;
                break;
            }
            *node = (struct node){list, i * t};
            list = node;
        }
        while (list) {
            struct node *next = list->next;
            sums[t] += list->value;
            free(list);
            list = next;
        }
        int *zeros = calloc(16, sizeof *zeros);
        zeros = realloc(zeros, 64 * sizeof *zeros);
        for (int i = 0; i < 16; i++) sums[t] += zeros[i];
        free(zeros);
    }
    SAME(nulls, 0);
    for (int t = 0; t < THREADS; t++) SAME(sums[t], 1225l * t);
}

static void strings(void) {
    char text[64] = "";
    int compared = 9, length = 0, found = 0;
    #pragma omp target map(tofrom : text, compared, length, found)
    {
        char other[64];
        strcpy(other, "offloaded");
        strcat(other, " text");
        memmove(other + 3, other, strlen(other) + 1);
        memset(other, '-', 3);
        compared = strcmp(other, "---offloaded text");
        length = (int)strlen(other);
        found = (int)(strchr(other, 'l') - other);
        memcpy(text, other, sizeof text);
    }
    CHECK(strcmp(text, "---offloaded text") == 0);
    SAME(compared, 0);
    SAME(length, 17);
    SAME(found, 6);
}

// Structures by value, pointers to functions, and an array whose length is known when it runs.
struct vector {
    double x, y, z;
};

#pragma omp declare target
static struct vector cross(struct vector a, struct vector b) {
    return (struct vector){a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

typedef int operation(int, int);
static int plus(int a, int b) { return a + b; }
static int times(int a, int b) { return a * b; }
static operation *const operations[] = {plus, times};
#pragma omp end declare target

static void language(int *a) {
    double volume = 0;
    #pragma omp target teams distribute parallel for map(from : a[0:N]) map(tofrom : volume)          \
        reduction(+ : volume) thread_limit(32)
    for (int i = 0; i < N; i++) {
        int local[(i & 15) + 1];
        for (int k = 0; k <= (i & 15); k++) local[k] = k + i;
        a[i] = operations[i & 1](local[i & 15], 3);
        struct vector v = cross((struct vector){i, 1, 2}, (struct vector){3, i & 31, 5});
        volume += v.x + v.y + v.z;
    }
    double volume_ = 0;
    for (int i = 0; i < N; i++) {
        SAME(a[i], operations[i & 1]((i & 15) + i, 3));
        struct vector v = cross((struct vector){i, 1, 2}, (struct vector){3, i & 31, 5});
        volume_ += v.x + v.y + v.z;
    }
    SAME(volume, volume_);
}

static void mathematics(double *d, float *f) {
    #pragma omp target teams distribute parallel for map(from : d[0:N], f[0:N])
    for (int i = 0; i < N; i++) {
        double x = (i - N / 2) * 0.01;
        d[i] = sin(x) + exp(x) * sqrt(fabs(x)) + pow(2, x) + log(1 + fabs(x)) + floor(x) +
               tgamma(1 + fabs(x)) + hypot(x, 3) + fmod(x, 0.7);
        f[i] = sinf((float)x) + cosf((float)x) + expf(-fabsf((float)x));
    }
    for (int i = 0; i < N; i++) {
        double x = (i - N / 2) * 0.01;
        double expected = sin(x) + exp(x) * sqrt(fabs(x)) + pow(2, x) + log(1 + fabs(x)) +
                          floor(x) + tgamma(1 + fabs(x)) + hypot(x, 3) + fmod(x, 0.7);
        CHECK(fabs(d[i] - expected) <= 1e-11 * (1 + fabs(expected)));
        CHECK(fabsf(f[i] - (sinf((float)x) + cosf((float)x) + expf(-fabsf((float)x)))) < 1e-5f);
    }
}

int main(void) {
    CHECK(omp_get_num_devices() > 0);
    int *a = allocate(N * sizeof *a);
    double *d = allocate(N * sizeof *d);
    float *f = allocate(N * sizeof *f);
    for (int round = 0; round < 6; round++) {
        prints(round);
        heap();
        strings();
        language(a);
        mathematics(d, f);
        printf("round %d\n", round);
        fflush(stdout);
    }
    printf("ok omp_library\n");
    return 0;
}
