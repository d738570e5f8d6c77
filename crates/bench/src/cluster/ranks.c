// Ranks that hold random memory and take steps together. `ranks BYTES` has each hold so many; the
// first one obeys a line at a time: `ping` is one step, `beat SECONDS` steps for so long. It
// answers with the longest time from one step's end to the next's. A step writes to some pages and
// sums over all ranks, and a wrong sum ends the program.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, TOUCHED = 20 };

static int rank, ranks;
static uint64_t state = 88172645463325252u;
static char *memory;
static size_t pages;

static uint64_t drawn(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

// One step; whether the first rank wants another.
static int step(int more) {
    static long number;
    for (int i = 0; i < TOUCHED && pages; i++) {
        uint64_t word = drawn();
        memcpy(memory + word % pages * PAGE, &word, sizeof word);
    }
    long own[2] = {rank + ++number, rank == 0 && more}, all[2];
    MPI_Allreduce(own, all, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (all[0] != (long)ranks * (ranks - 1) / 2 + ranks * number) {
        fprintf(stderr, "ranks: the sum of step %ld is wrong\n", number);
        MPI_Abort(MPI_COMM_WORLD, 3);
    }
    return all[1] != 0;
}

static double beat(double seconds) {
    double begin = MPI_Wtime(), last = begin, longest = 0;
    int more = 1;
    while (more) {
        more = step(last - begin < seconds);
        double now = MPI_Wtime();
        longest = now - last > longest ? now - last : longest;
        last = now;
    }
    return longest;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    pages = argc > 1 ? strtoull(argv[1], 0, 10) / PAGE : 0;
    memory = malloc(pages * PAGE + 1);
    if (!memory) MPI_Abort(MPI_COMM_WORLD, 2);
    state += rank;
    for (size_t at = 0; at < pages * PAGE; at += sizeof state) {
        uint64_t word = drawn();
        memcpy(memory + at, &word, sizeof word);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) puts("ready"), fflush(stdout);
    for (;;) {
        double seconds = -1;
        char line[128];
        if (rank == 0 && fgets(line, sizeof line, stdin))
            seconds = strncmp(line, "beat ", 5) == 0 ? strtod(line + 5, 0) : 0;
        MPI_Bcast(&seconds, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        if (seconds < 0) break;
        double longest = beat(seconds);
        if (rank == 0) printf("%.9f\n", longest), fflush(stdout);
    }
    MPI_Finalize();
    return 0;
}
