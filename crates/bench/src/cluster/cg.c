// NAS CG, an own program after "The NAS Parallel Benchmarks" (RNR-94-007) and their tables of
// problems: the smallest eigenvalue of a sparse matrix by the inverse power method, 25 steps of
// conjugate gradients for each of its own. Ranks have rows in turn; each step gathers a vector and
// sums twice.
#include "nas.h"

struct problem {
    int n, nonzero, steps;
    double shift, zeta;
};

static const char classes[] = "SWAB";
static const struct problem problems[] = {
    {1400, 7, 15, 10, 8.5971775078648},
    {7000, 8, 15, 12, 10.362595087124},
    {14000, 11, 15, 20, 17.130235054029},
    {75000, 13, 75, 60, 22.712745482631},
};

// This rank's rows of the matrix, row by row, and where those of each rank are.
static int first, own, *starts, *columns, *counts, *places;
static double *values;

// The benchmarks' numbers: x times 5^13 modulo 2^46, between 0 and 1.
static double drawn(void) {
    static unsigned long state = 314159265;
    state = (unsigned long)((unsigned __int128)state * 1220703125 & ((1ul << 46) - 1));
    return (double)state / (double)(1ul << 46);
}

// A sparse vector: `nonzero` numbers at places that are drawn, and 0.5 at place `at`.
static int draw_vector(const struct problem *it, int at, int *where, double *what) {
    int power = 1, count = 0;
    while (power < it->n) power *= 2;
    while (count < it->nonzero) {
        double value = drawn();
        int place = (int)(power * drawn()), seen = place >= it->n;
        for (int i = 0; i < count; i++) seen |= where[i] == place;
        if (seen) continue;
        where[count] = place, what[count++] = value;
    }
    for (int i = 0; i < count; i++)
        if (where[i] == at) return what[i] = 0.5, count;
    where[count] = at, what[count] = 0.5;
    return count + 1;
}

static int by_number(const void *left, const void *right) {
    int a = *(const int *)left, b = *(const int *)right;
    return (a > b) - (a < b);
}

// The matrix is the sum of the vectors' outer products, whose weights fall from 1 to 0.1, and of
// 0.1 less the shift on its diagonal. Each rank draws all vectors and keeps its own rows.
static void make_matrix(const struct problem *it) {
    int most = it->nonzero + 1, *where = room((size_t)it->n * most, sizeof *where);
    int *lengths = room(it->n, sizeof *lengths), *begins = room(own + 1, sizeof *begins);
    double *what = room((size_t)it->n * most, sizeof *what);
    // The benchmark leaves the first number out.
    drawn();
    for (int i = 0; i < it->n; i++) {
        int *places_of = where + (size_t)i * most;
        lengths[i] = draw_vector(it, i, places_of, what + (size_t)i * most);
        for (int k = 0; k < lengths[i]; k++) {
            int row = places_of[k] - first;
            if (row >= 0 && row < own) begins[row + 1]++;
        }
    }
    for (int row = 0; row < own; row++) begins[row + 1] += begins[row];
    // For each row the vectors that have it, in their order.
    int *in = room(begins[own] + 1, sizeof *in), *next = room(own + 1, sizeof *next);
    for (int i = 0; i < it->n; i++)
        for (int k = 0; k < lengths[i]; k++) {
            int row = where[(size_t)i * most + k] - first;
            if (row >= 0 && row < own) in[begins[row] + next[row]++] = i;
        }
    size_t bound = (size_t)begins[own] * most;
    starts = room(own + 1, sizeof *starts), columns = room(bound, sizeof *columns);
    values = room(bound, sizeof *values);
    double *sums = room(it->n, sizeof *sums), ratio = pow(0.1, 1.0 / it->n);
    char *used = room(it->n, 1);
    for (int row = 0; row < own; row++) {
        int *found = columns + starts[row], count = 0;
        for (int at = begins[row]; at < begins[row + 1]; at++) {
            int i = in[at], *places_of = where + (size_t)i * most, mine = 0;
            double *numbers = what + (size_t)i * most;
            while (places_of[mine] != first + row) mine++;
            double weight = pow(ratio, i) * numbers[mine];
            for (int k = 0; k < lengths[i]; k++) {
                int column = places_of[k];
                if (!used[column]) used[column] = 1, found[count++] = column;
                sums[column] += weight * numbers[k];
            }
        }
        sums[first + row] += 0.1 - it->shift;
        qsort(found, count, sizeof *found, by_number);
        for (int k = 0; k < count; k++) {
            values[starts[row] + k] = sums[found[k]];
            sums[found[k]] = 0, used[found[k]] = 0;
        }
        starts[row + 1] = starts[row] + count;
    }
    free(where), free(lengths), free(begins), free(what);
    free(in), free(next), free(sums), free(used);
}

static double dot(const double *left, const double *right) {
    double part = 0, whole;
    for (int i = 0; i < own; i++) part += left[i] * right[i];
    MPI_Allreduce(&part, &whole, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return whole;
}

// The product of the matrix and the vector of which each rank has its rows.
static void multiply(const double *vector, double *all, double *product) {
    MPI_Allgatherv(vector, own, MPI_DOUBLE, all, counts, places, MPI_DOUBLE, MPI_COMM_WORLD);
    for (int row = 0; row < own; row++) {
        double sum = 0;
        for (int at = starts[row]; at < starts[row + 1]; at++) sum += values[at] * all[columns[at]];
        product[row] = sum;
    }
}

// z, about the solution of A z = x; the norm of what is left.
static double solve(const double *x, double *z, double *r, double *p, double *q, double *all) {
    memset(z, 0, own * sizeof *z);
    memcpy(r, x, own * sizeof *r), memcpy(p, x, own * sizeof *p);
    double rho = dot(r, r);
    for (int step = 0; step < 25; step++) {
        multiply(p, all, q);
        double alpha = rho / dot(p, q), before = rho;
        for (int i = 0; i < own; i++) z[i] += alpha * p[i], r[i] -= alpha * q[i];
        rho = dot(r, r);
        for (int i = 0; i < own; i++) p[i] = r[i] + rho / before * p[i];
    }
    multiply(z, all, q);
    for (int i = 0; i < own; i++) r[i] = x[i] - q[i];
    return sqrt(dot(r, r));
}

static double power_method(const struct problem *it, int steps, double *x, double *room_for) {
    double *z = room_for, *r = z + own, *p = r + own, *q = p + own, *all = q + own, zeta = 0;
    for (int i = 0; i < own; i++) x[i] = 1;
    for (int step = 0; step < steps; step++) {
        solve(x, z, r, p, q, all);
        zeta = it->shift + 1 / dot(x, z);
        double norm = 1 / sqrt(dot(z, z));
        for (int i = 0; i < own; i++) x[i] = norm * z[i];
    }
    return zeta;
}

int main(int argc, char **argv) {
    int times, class = begin_as(argc, argv, classes, &times);
    if (class < 0) refuse("cg S|W|A|B TIMES");
    const struct problem *it = &problems[class];
    counts = room(ranks, sizeof *counts), places = room(ranks, sizeof *places);
    for (int i = 0; i < ranks; i++) {
        places[i] = (int)((long)it->n * i / ranks);
        counts[i] = (int)((long)it->n * (i + 1) / ranks) - places[i];
    }
    first = places[rank], own = counts[rank];
    make_matrix(it);
    double *x = room(own, sizeof *x), *memory = room(4 * (size_t)own + it->n, sizeof *memory);
    // Touches all that the timed ones use, as the benchmarks have it.
    power_method(it, 1, x, memory);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime(), worst = 0;
    for (int time = 0; time < times; time++)
        worst = worse(worst, power_method(it, it->steps, x, memory), it->zeta);
    double seconds = MPI_Wtime() - begin;
    return end_with("cg", classes[class], worst, 1e-10, seconds);
}
