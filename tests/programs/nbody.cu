// All-pairs gravity through shared-memory tiles; momentum is kept, forces match the host's.
#include "check.h"

__device__ float3 pull(float3 a, float4 p, float4 q)
{
    float x = q.x - p.x, y = q.y - p.y, z = q.z - p.z;
    float d = x * x + y * y + z * z + 1e-3f, inv = rsqrtf(d), s = q.w * inv * inv * inv;
    a.x += x * s, a.y += y * s, a.z += z * s;
    return a;
}

__global__ void accelerate(const float4 *body, float3 *out, int n)
{
    extern __shared__ float4 tile[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 me = body[i < n ? i : 0];
    float3 a = {0, 0, 0};
    for (int base = 0; base < n; base += blockDim.x) {
        int j = base + threadIdx.x;
        tile[threadIdx.x] = j < n ? body[j] : make_float4(0, 0, 0, 0);
        __syncthreads();
        for (int k = 0; k < blockDim.x; k++) a = pull(a, me, tile[k]);
        __syncthreads();
    }
    if (i < n) out[i] = a;
}

int main()
{
    const int n = 1000, threads = 128;
    Random random(10);
    std::vector<float4> body(n);
    for (auto &b : body)
        b = make_float4(random.uniform(), random.uniform(), random.uniform(), random.uniform());
    Device<float4> dbody(body);
    Device<float3> dout(n);
    accelerate<<<(n + threads - 1) / threads, threads, threads * sizeof(float4)>>>(dbody, dout, n);
    CUDA(cudaGetLastError());
    auto got = dout.host();
    double px = 0, py = 0, pz = 0;
    for (int i = 0; i < n; i++) {
        px += body[i].w * got[i].x, py += body[i].w * got[i].y, pz += body[i].w * got[i].z;
        if (i % 50) continue;
        double ax = 0, ay = 0, az = 0;
        for (int j = 0; j < n; j++) {
            double x = body[j].x - body[i].x, y = body[j].y - body[i].y, z = body[j].z - body[i].z;
            double s = body[j].w / std::pow(x * x + y * y + z * z + 1e-3, 1.5);
            ax += x * s, ay += y * s, az += z * s;
        }
        REQUIRE(close(got[i].x, ax, 1e-3) && close(got[i].y, ay, 1e-3) && close(got[i].z, az, 1e-3));
    }
    REQUIRE(std::fabs(px) < 5 && std::fabs(py) < 5 && std::fabs(pz) < 5);
    OK("%d bodies", n);
}
