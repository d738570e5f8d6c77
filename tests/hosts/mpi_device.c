// MPI ranks with a device each: what one's device has goes to the next rank, whose device mixes it
// in; the messages lie in pinned memory. The first rank draws the nonce and speaks, as step.c does;
// what the devices have must be what the hosts compute, or it says "wrong". Usage: mpi_device STEPS
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 1 << 14 };

void device_begin(uint32_t seed, uint32_t **out, uint32_t **in);
void device_out(uint32_t *out);
int device_step(const uint32_t *in, uint32_t *out, uint32_t number);

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce = 0;
    if (rank == 0) getrandom(&nonce, sizeof nonce, 0);
    MPI_Bcast(&nonce, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    uint32_t *out, *in;
    device_begin((uint32_t)nonce + rank, &out, &in);
    device_out(out);
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    for (int step = 1; step <= steps; step++) {
        MPI_Sendrecv(out, WORDS, MPI_UINT32_T, next, 1, in, WORDS, MPI_UINT32_T, previous, 1,
                     MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        int well = device_step(in, out, step), all_well = 0;
        uint32_t sum = 0, all = 0;
        for (int i = 0; i < WORDS; i++) sum += out[i];
        MPI_Allreduce(&sum, &all, 1, MPI_UINT32_T, MPI_SUM, MPI_COMM_WORLD);
        MPI_Allreduce(&well, &all_well, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        if (rank == 0) {
            char line[128];
            const char *form = all_well ? "%016lx %d %08x\n" : "wrong %016lx %d %08x\n";
            int length = snprintf(line, sizeof line, form, nonce, step, all);
            if (write(1, line, length) != length) MPI_Abort(MPI_COMM_WORLD, 2);
        }
        nanosleep(&(struct timespec){0, 5000000}, 0);
    }
    MPI_Finalize();
    return 7;
}
