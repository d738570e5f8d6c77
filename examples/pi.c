/* A long computation with threads: pi by Leibniz's series, a line a second. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 2, STEPS = 6, TERMS = 20000000 };

static double part[THREADS];
static pthread_barrier_t gate;

static void *work(void *number)
{
    long self = (long)number;
    for (long step = 0; step < STEPS; step++) {
        for (long i = self; i < TERMS; i += THREADS) {
            long k = step * TERMS + i;
            part[self] += (k % 2 ? -4.0 : 4.0) / (2 * k + 1);
        }
        pthread_barrier_wait(&gate);
        if (self == 0) {
            printf("step %ld of %d: %.10f\n", step + 1, STEPS, part[0] + part[1]);
            fflush(stdout);
            sleep(1);
        }
        pthread_barrier_wait(&gate);
    }
    return NULL;
}

int main(void)
{
    srand(time(NULL) ^ getpid());
    printf("run %08x begins\n", (unsigned)rand());
    fflush(stdout);
    pthread_t threads[THREADS];
    pthread_barrier_init(&gate, NULL, THREADS);
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("pi = %.8f\n", part[0] + part[1]);
    return 0;
}
