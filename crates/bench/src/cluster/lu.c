// NAS LU, an own program after "The NAS Parallel Benchmarks" (RNR-94-007) and their tables of
// problems: the compressible Navier-Stokes equations on a cube, by symmetric successive
// over-relaxation. Ranks have slabs of rows in j. Each plane of a sweep waits for one row of the
// rank before (or, upwards, behind), so there are many small messages. It is verified by residuals,
// errors and a surface integral.
#include "nas.h"

enum { M = 5, GHOSTS = 2 };

struct problem {
    int n, steps;
    double dt, residuals[M], errors[M], surface;
};

static const char classes[] = "SW";
static const struct problem problems[] = {
    {12, 50, 0.5,
     {1.6196343210976702e-02, 2.1976745164821318e-03, 1.5179927653399185e-03,
      1.5029584435994323e-03, 3.4264073155896461e-02},
     {6.4223319957960924e-04, 8.4144342047347926e-05, 5.8588269616485186e-05,
      5.8474222595157350e-05, 1.3103347914111294e-03},
     7.8418928865937083e+00},
    {33, 300, 1.5e-3,
     {0.1236511638192e+02, 0.1317228477799e+01, 0.2550120713095e+01, 0.2326187750252e+01,
      0.2826799444189e+02},
     {0.4867877144216e+00, 0.5064652880982e-01, 0.9281818101960e-01, 0.8570126542733e-01,
      0.1084277417792e+01},
     0.1161399311023e+02},
};

// Of each component the polynomials of the exact solution: 1; x, y, z; their squares; and so on.
static const double exact_of[M][13] = {
    {2, 0, 0, 4, 5, 3, 0.5, 0.02, 0.01, 0.03, 0.5, 0.4, 0.3},
    {1, 0, 0, 0, 1, 2, 3, 0.01, 0.03, 0.02, 0.4, 0.3, 0.5},
    {2, 2, 0, 0, 0, 2, 3, 0.04, 0.03, 0.05, 0.3, 0.5, 0.4},
    {2, 2, 0, 0, 0, 2, 3, 0.03, 0.05, 0.04, 0.2, 0.1, 0.3},
    {5, 4, 3, 2, 0.1, 0.4, 0.3, 0.05, 0.04, 0.03, 0.1, 0.3, 0.2},
};

// Constants of the equations, whose products with the viscosity and the conductivity are the last.
static const double C1 = 1.4, C2 = 0.4, C34 = 0.1, C1345 = 1.4 * 0.1 * 1.4, R43 = 4.0 / 3.0;
static const double OMEGA = 1.2, DISSIPATION = 0.25;
static const double second_order[3] = {0.75, 0.75, 1.0};

static int n, first, rows;
// The grid's step, and terms of differences of the first and second order.
static double h, t1, t2, t3, dt;
typedef double vector[M];
// The solution, what the equations leave of it, and what they leave of the exact one.
static vector *u, *r, *forcing;

// Rows from -GHOSTS to rows + GHOSTS - 1 of this rank; k is slowest.
static size_t at(int i, int j, int k) {
    return ((size_t)k * (rows + 2 * GHOSTS) + (j + GHOSTS)) * n + i;
}

static size_t points(void) {
    return (size_t)n * n * (rows + 2 * GHOSTS);
}

// Rows of this rank that are not on the cube's surface.
static int low(void) { return first == 0; }
static int high(void) { return rows - (first + rows == n); }

static void exact(int i, int j, int k, double *value) {
    double x[3] = {i * h, (first + j) * h, k * h};
    for (int m = 0; m < M; m++) {
        value[m] = exact_of[m][0];
        for (int d = 0; d < 3; d++) {
            const double *c = exact_of[m] + 1 + d;
            value[m] += (c[0] + (c[3] + (c[6] + c[9] * x[d]) * x[d]) * x[d]) * x[d];
        }
    }
}

// What flows in direction d without friction.
static void flux(const double *v, int d, double *f) {
    double speed = v[1 + d] / v[0];
    double q = 0.5 * (v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / v[0];
    f[0] = v[1 + d];
    for (int m = 1; m < 4; m++) f[m] = v[m] * speed;
    f[1 + d] += C2 * (v[4] - q);
    f[4] = (C1 * v[4] - C2 * q) * speed;
}

// What friction and heat carry in direction d between two neighbours.
static void friction(const double *left, const double *right, int d, double *f) {
    double squares = 0, normal = 0;
    for (int m = 1; m < 4; m++) {
        double a = left[m] / left[0], b = right[m] / right[0];
        f[m] = t3 * (b - a) * (m == 1 + d ? R43 : 1);
        squares += b * b - a * a;
        if (m == 1 + d) normal = b * b - a * a;
    }
    f[4] = 0.5 * (1 - C1 * C1) * t3 * squares + t3 / 6 * normal
        + C1 * C1 * t3 * (right[4] / right[0] - left[4] / left[0]);
}

// Adds to `sum` the differences of v in direction d at a point, the p-th of its line.
static void line(const vector *v, int d, int p, size_t here, size_t step, double *sum) {
    const double *b = v[here - step], *c = v[here], *e = v[here + step];
    double from[M], to[M], left[M], right[M];
    flux(b, d, from), flux(e, d, to), friction(b, c, d, left), friction(c, e, d, right);
    for (int m = 0; m < M; m++) {
        double whole = second_order[d] * t1 * (b[m] - 2 * c[m] + e[m]) - t2 * (to[m] - from[m]);
        if (m > 0) whole += t3 * C34 * (right[m] - left[m]);
        // One-sided beside the surface.
        double fourth = 6 * c[m] - 4 * (b[m] + e[m]);
        if (p == 1 || p == n - 2) fourth = 5 * c[m] - 4 * (p == 1 ? e[m] : b[m]);
        if (p > 2) fourth += v[here - 2 * step][m];
        if (p < n - 3) fourth += v[here + 2 * step][m];
        sum[m] += whole - DISSIPATION * fourth;
    }
}

// Rows that neighbours need of v, two deep.
static void exchange(vector *v) {
    size_t plane = (size_t)(rows + 2 * GHOSTS) * n * M;
    MPI_Datatype edge;
    MPI_Type_vector(n, GHOSTS * n * M, (int)plane, MPI_DOUBLE, &edge);
    MPI_Type_commit(&edge);
    int before = rank ? rank - 1 : MPI_PROC_NULL;
    int after = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    double *low_ghosts = v[at(0, -GHOSTS, 0)], *high_ghosts = v[at(0, rows, 0)];
    double *lowest = v[at(0, 0, 0)], *highest = v[at(0, rows - GHOSTS, 0)];
    MPI_Sendrecv(lowest, 1, edge, before, 1, high_ghosts, 1, edge, after, 1, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    MPI_Sendrecv(highest, 1, edge, after, 2, low_ghosts, 1, edge, before, 2, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    MPI_Type_free(&edge);
}

// All differences of v, less what the exact solution would leave.
static void differences(vector *v, const vector *less, vector *to) {
    exchange(v);
    size_t steps[3] = {1, (size_t)n, (size_t)n * (rows + 2 * GHOSTS)};
    for (int k = 1; k < n - 1; k++)
        for (int j = low(); j < high(); j++)
            for (int i = 1; i < n - 1; i++) {
                size_t here = at(i, j, k);
                double sum[M];
                for (int m = 0; m < M; m++) sum[m] = less ? -less[here][m] : 0;
                line(v, 0, i, here, steps[0], sum);
                line(v, 1, first + j, here, steps[1], sum);
                line(v, 2, k, here, steps[2], sum);
                memcpy(to[here], sum, sizeof sum);
            }
}

// Adds to `sum` the product of w and the neighbour's block in direction d: `side` is -1 for what is
// before the point and 1 for what is behind.
static void block(const double *v, const double *w, int d, double side, double *sum) {
    double t = 1 / v[0], s = v[1 + d] * t;
    double q = 0.5 * (v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) * t * t;
    double along = 0, energy = -C1345 * v[4] * t * t * w[0] + C1345 * t * w[4];
    double pressure = C2 * (q * w[0] + w[4]), a[M], f[M];
    for (int m = 1; m < 4; m++) {
        double speed = v[m] * t, change = t * (w[m] - speed * w[0]), weight = m == 1 + d ? R43 : 1;
        pressure -= C2 * speed * w[m];
        along = m == 1 + d ? change : along;
        f[m] = weight * C34 * change;
        energy += (weight * C34 - C1345) * speed * change;
    }
    double total = (C1 * v[4] - C2 * q * v[0]) * t;
    for (int m = 1; m < 4; m++) a[m] = s * w[m] + v[m] * along;
    a[0] = w[1 + d], a[1 + d] += pressure, f[0] = 0, f[4] = energy;
    a[4] = total * w[1 + d] + s * (pressure + w[4] - total * w[0]);
    for (int m = 0; m < M; m++)
        sum[m] += dt * (side * t2 * a[m] - t1 * f[m] - t1 * second_order[d] * w[m]);
}

// Solves the point's own block for x, which is made of the right side. But for its first column and
// its last row it is diagonal.
static void solve_point(const double *v, double *x) {
    double t = 1 / v[0], plain = 1;
    for (int d = 0; d < 3; d++) plain += 2 * dt * t1 * second_order[d];
    // All directions together: in one of the three a component of the speed counts by 4/3.
    double slows = 2 * dt * t1 * (R43 + 2) * C34 * t, heats = 2 * dt * t1 * 3 * C1345 * t;
    x[0] /= plain;
    double energy = x[4] + heats * v[4] * t * x[0];
    for (int m = 1; m < 4; m++) {
        double speed = v[m] * t;
        x[m] = (x[m] + slows * speed * x[0]) / (plain + slows);
        energy -= (slows - heats) * speed * (x[m] - speed * x[0]);
    }
    x[4] = energy / (plain + heats);
}

// One plane of the sweep that begins at the corner of the lowest (side -1) or highest indices.
static void sweep_plane(int k, int side) {
    int from = side < 0 ? rank - 1 : rank + 1, to = side < 0 ? rank + 1 : rank - 1;
    int j0 = side < 0 ? low() : high() - 1, j1 = side < 0 ? high() : low() - 1;
    if (from >= 0 && from < ranks)
        MPI_Recv(r[at(0, side < 0 ? -1 : rows, k)], n * M, MPI_DOUBLE, from, 3, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    for (int j = j0; j != j1; j -= side)
        for (int i = side < 0 ? 1 : n - 2; i != (side < 0 ? n - 1 : 0); i -= side) {
            size_t here = at(i, j, k);
            size_t next[3] = {at(i + side, j, k), at(i, j + side, k), at(i, j, k + side)};
            double sum[M] = {0}, x[M], *own = r[here];
            for (int d = 0; d < 3; d++) block(u[next[d]], r[next[d]], d, side, sum);
            for (int m = 0; m < M; m++) x[m] = (side < 0 ? own[m] : 0) + side * OMEGA * sum[m];
            solve_point(u[here], x);
            for (int m = 0; m < M; m++) own[m] = side < 0 ? x[m] : own[m] - x[m];
        }
    if (to >= 0 && to < ranks)
        MPI_Send(r[at(0, side < 0 ? rows - 1 : 0, k)], n * M, MPI_DOUBLE, to, 3, MPI_COMM_WORLD);
}

static void relax(int steps) {
    differences(u, forcing, r);
    for (int step = 0; step < steps; step++) {
        for (int k = 1; k < n - 1; k++)
            for (int j = low(); j < high(); j++)
                for (int i = 1; i < n - 1; i++)
                    for (int m = 0; m < M; m++) r[at(i, j, k)][m] *= dt;
        for (int k = 1; k < n - 1; k++) sweep_plane(k, -1);
        for (int k = n - 2; k > 0; k--) sweep_plane(k, 1);
        for (int k = 1; k < n - 1; k++)
            for (int j = low(); j < high(); j++)
                for (int i = 1; i < n - 1; i++)
                    for (int m = 0; m < M; m++)
                        u[at(i, j, k)][m] += r[at(i, j, k)][m] / (OMEGA * (2 - OMEGA));
        differences(u, forcing, r);
    }
}

static int is_surface(int index) {
    return index == 0 || index == n - 1;
}

// The exact solution everywhere, or on the surface and between it by transfinite interpolation.
static void begin_with(vector *v, int everywhere) {
    for (int k = 0; k < n; k++)
        for (int j = 0; j < rows; j++)
            for (int i = 0; i < n; i++) {
                double *here = v[at(i, j, k)];
                if (everywhere || is_surface(i) || is_surface(first + j) || is_surface(k)) {
                    exact(i, j, k, here);
                    continue;
                }
                double x[3] = {i * h, (first + j) * h, k * h}, p[3][M], a[M], b[M];
                for (int d = 0; d < 3; d++) {
                    exact(d == 0 ? 0 : i, d == 1 ? -first : j, d == 2 ? 0 : k, a);
                    exact(d == 0 ? n - 1 : i, d == 1 ? n - 1 - first : j, d == 2 ? n - 1 : k, b);
                    for (int m = 0; m < M; m++) p[d][m] = (1 - x[d]) * a[m] + x[d] * b[m];
                }
                for (int m = 0; m < M; m++)
                    here[m] = 1 - (1 - p[0][m]) * (1 - p[1][m]) * (1 - p[2][m]);
            }
}

// The roots of the mean squares of r, and of how far u is from the exact solution.
static void norms(double *residuals, double *errors) {
    double own[2 * M] = {0}, all[2 * M];
    for (int k = 1; k < n - 1; k++)
        for (int j = low(); j < high(); j++)
            for (int i = 1; i < n - 1; i++) {
                double right[M], *is = u[at(i, j, k)], *left = r[at(i, j, k)];
                exact(i, j, k, right);
                for (int m = 0; m < M; m++) {
                    own[m] += left[m] * left[m];
                    own[M + m] += (is[m] - right[m]) * (is[m] - right[m]);
                }
            }
    MPI_Allreduce(own, all, 2 * M, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    double count = (double)(n - 2) * (n - 2) * (n - 2);
    for (int m = 0; m < M; m++) {
        residuals[m] = sqrt(all[m] / count);
        errors[m] = sqrt(all[M + m] / count);
    }
}

static double pressure(int i, int j, int k) {
    const double *v = u[at(i, j, k)];
    return C2 * (v[4] - 0.5 * (v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / v[0]);
}

// The pressure on a box inside the cube, by the trapezoidal rule.
static double surface(void) {
    int lows[3] = {1, 1, 2}, highs[3] = {n - 2, n - 3, n - 2};
    double own = 0, all;
    for (int k = lows[2]; k <= highs[2]; k++)
        for (int j = 0; j < rows; j++)
            for (int i = lows[0]; i <= highs[0]; i++) {
                int p[3] = {i, first + j, k};
                double half[3];
                if (p[1] < lows[1] || p[1] > highs[1]) continue;
                for (int d = 0; d < 3; d++) half[d] = p[d] == lows[d] || p[d] == highs[d] ? 0.5 : 1;
                for (int d = 0; d < 3; d++) {
                    double weight = half[(d + 1) % 3] * half[(d + 2) % 3];
                    if (half[d] < 1) own += weight * pressure(i, j, k);
                }
            }
    MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    return all * h * h;
}

static double verified(const struct problem *it) {
    double residuals[M], errors[M], worst = worse(0, surface(), it->surface);
    norms(residuals, errors);
    for (int m = 0; m < M; m++) {
        worst = worse(worst, residuals[m], it->residuals[m]);
        worst = worse(worst, errors[m], it->errors[m]);
    }
    return worst;
}

int main(int argc, char **argv) {
    int times, class = begin_as(argc, argv, classes, &times);
    const struct problem *it = &problems[class < 0 ? 0 : class];
    if (class < 0 || it->n / ranks < GHOSTS)
        refuse("lu S|W TIMES, on so few ranks that each has two rows");
    n = it->n, dt = it->dt, h = 1.0 / (n - 1);
    t1 = 1 / (h * h), t2 = 1 / (2 * h), t3 = 1 / h;
    first = n * rank / ranks, rows = n * (rank + 1) / ranks - first;
    u = room(points(), sizeof *u), r = room(points(), sizeof *r);
    forcing = room(points(), sizeof *forcing);
    begin_with(u, 1);
    differences(u, 0, forcing);
    // Touches all that the timed ones use, as the benchmarks have it.
    begin_with(u, 0);
    relax(1);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime(), worst = 0;
    for (int time = 0; time < times; time++) {
        begin_with(u, 0);
        memset(r, 0, points() * sizeof *r);
        relax(it->steps);
        worst = worse(worst, 1 + verified(it), 1);
    }
    double seconds = MPI_Wtime() - begin;
    return end_with("lu", classes[class], worst, 1e-8, seconds);
}
