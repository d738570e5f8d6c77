// What the programs after the NAS Parallel Benchmarks have in common: how each begins and ends.
// `NAME CLASS TIMES` solves the problem of a class so often, verifies each, and prints the seconds.
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static void *room(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) {
        fprintf(stderr, "no memory\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return memory;
}

// Begins, and returns which of `classes` is asked for and, in `times`, how often; -1 if none is.
static int begin_as(int argc, char **argv, const char *classes, int *times) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    *times = argc > 2 ? atoi(argv[2]) : 1;
    const char *found = argc > 1 && *argv[1] ? strchr(classes, *argv[1]) : 0;
    return found && *times > 0 ? (int)(found - classes) : -1;
}

static void refuse(const char *usage) {
    fprintf(stderr, "usage: %s\n", usage);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

// The worse of an error and of how far `is` is from what is known, of that.
static double worse(double worst, double is, double known) {
    double error = fabs((is - known) / known);
    return error > worst || error != error ? error : worst;
}

// Ends with the seconds, or with what is wrong: the worst error, where one is more than `bound`.
static int end_with(const char *name, char class, double worst, double bound, double seconds) {
    if (rank == 0 && !(worst <= bound)) {
        fprintf(stderr, "%s: class %c is wrong by %g\n", name, class, worst);
        MPI_Abort(MPI_COMM_WORLD, 3);
    }
    if (rank == 0) printf("%.6f\n", seconds);
    MPI_Finalize();
    return 0;
}
