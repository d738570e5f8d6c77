// A seven-point stencil in space, with the planes kept in registers and the halo in shared memory.
#include "check.h"

const int X = 16, Y = 8;

__global__ void step(const double *in, double *out, int nx, int ny, int nz)
{
    __shared__ double plane[Y + 2][X + 2];
    int tx = threadIdx.x + 1, ty = threadIdx.y + 1;
    int x = blockIdx.x * X + threadIdx.x, y = blockIdx.y * Y + threadIdx.y;
    bool inside = x > 0 && x < nx - 1 && y > 0 && y < ny - 1, there = x < nx && y < ny;
    auto at = [=](int i, int j, int k) { return (size_t(k) * ny + j) * nx + i; };
    double below = there ? in[at(x, y, 0)] : 0, here = there ? in[at(x, y, 1)] : 0;
    for (int z = 1; z < nz - 1; z++) {
        double above = there ? in[at(x, y, z + 1)] : 0;
        __syncthreads();
        plane[ty][tx] = here;
        if (inside && tx == 1) plane[ty][0] = in[at(x - 1, y, z)];
        if (inside && tx == X) plane[ty][X + 1] = in[at(x + 1, y, z)];
        if (inside && ty == 1) plane[0][tx] = in[at(x, y - 1, z)];
        if (inside && ty == Y) plane[Y + 1][tx] = in[at(x, y + 1, z)];
        __syncthreads();
        if (inside)
            out[at(x, y, z)] = (below + above + plane[ty][tx - 1] + plane[ty][tx + 1]
                                + plane[ty - 1][tx] + plane[ty + 1][tx]) / 6.0;
        below = here, here = above;
    }
}

int main()
{
    const int nx = 50, ny = 37, nz = 21;
    Random random(9);
    std::vector<double> u(nx * ny * nz);
    for (auto &x : u) x = random.uniform();
    Device<double> in(u), out(u);
    step<<<dim3((nx + X - 1) / X, (ny + Y - 1) / Y), dim3(X, Y)>>>(in, out, nx, ny, nz);
    auto got = out.host();
    for (int z = 0; z < nz; z++)
        for (int y = 0; y < ny; y++)
            for (int x = 0; x < nx; x++) {
                size_t i = (size_t(z) * ny + y) * nx + x;
                bool inside = x > 0 && y > 0 && z > 0 && x < nx - 1 && y < ny - 1 && z < nz - 1;
                double want = inside ? (u[i - nx * ny] + u[i + nx * ny] + u[i - 1] + u[i + 1] + u[i - nx]
                                        + u[i + nx]) / 6.0
                                     : u[i];
                REQUIRE(close(got[i], want, 1e-14));
            }
    OK("%dx%dx%d", nx, ny, nz);
}
