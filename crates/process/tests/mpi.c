// A ring and a sum over all ranks at each step. The first rank draws the nonce and speaks, as
// step.c does; what the ring and the sum bring must be right, or it says "wrong".
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static int rank, ranks;

// A word goes around, and each rank adds its own: what comes back to the first one.
static uint64_t around(uint64_t word) {
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    if (rank == 0) {
        MPI_Send(&word, 1, MPI_UINT64_T, next, 1, MPI_COMM_WORLD);
        MPI_Recv(&word, 1, MPI_UINT64_T, previous, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(&word, 1, MPI_UINT64_T, previous, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        word += rank;
        MPI_Send(&word, 1, MPI_UINT64_T, next, 1, MPI_COMM_WORLD);
    }
    return word;
}

// Blocks that are large enough to be copied between the processes' memory, and some in flight at
// any moment.
static int exchange(uint64_t word, int step) {
    enum { WORDS = 40000 };
    static uint64_t mine[WORDS], theirs[WORDS];
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    for (int i = 0; i < WORDS; i++) mine[i] = word + rank * 1000003ull + i;
    MPI_Request requests[2];
    MPI_Irecv(theirs, WORDS, MPI_UINT64_T, previous, 2 + step % 100, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(mine, WORDS, MPI_UINT64_T, next, 2 + step % 100, MPI_COMM_WORLD, &requests[1]);
    MPI_Status statuses[2];
    MPI_Waitall(2, requests, statuses);
    for (int i = 0; i < WORDS; i++)
        if (theirs[i] != word + previous * 1000003ull + i) return 0;
    return 1;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce = 0;
    if (rank == 0) getrandom(&nonce, sizeof nonce, 0);
    MPI_Bcast(&nonce, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    uint64_t value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        value = value * 6364136223846793005u + 1;
        double part = rank == step % ranks ? 1.0 / step : 0, whole = 0;
        MPI_Allreduce(&part, &whole, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        sum += whole;
        uint64_t back = around(value);
        int well = exchange(value, step), all_well = 0;
        if (rank == 0 && back != value + (uint64_t)ranks * (ranks - 1) / 2) well = 0;
        MPI_Allreduce(&well, &all_well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        if (rank == 0) {
            char line[128];
            const char *form = all_well ? "%016lx %d %.17g %016lx\n" : "wrong %016lx %d %.17g %016lx\n";
            int length = snprintf(line, sizeof line, form, nonce, step, sum, value);
            if (write(1, line, length) != length) MPI_Abort(MPI_COMM_WORLD, 2);
        }
        nanosleep(&(struct timespec){0, 5000000}, 0);
    }
    // Some libraries' ends hang now and then, undisturbed as well.
    if (getenv("WITHOUT_END")) MPI_Barrier(MPI_COMM_WORLD), sleep(2), _exit(7);
    MPI_Finalize();
    return 7;
}
