// The kernel that cudart_host.c launches.
__global__ void fill(int *p, int v) { p[threadIdx.x] = v + threadIdx.x; }
