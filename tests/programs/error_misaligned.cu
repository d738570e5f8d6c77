// A misaligned load faults as such and sticks.
// checkpoint refused: copy of the devices' memory cannot be read
// check finds: misaligned address in kernel
#include "check.h"

__global__ void load(const char *p, double *out) { *out = *(const double *)(p + 4); }

int main()
{
    Device<char> d(64);
    Device<double> out(1);
    load<<<1, 1>>>(d, out);
    EXPECT(cudaErrorMisalignedAddress, cudaDeviceSynchronize());
    EXPECT(cudaErrorMisalignedAddress, cudaDeviceSynchronize());
    OK("misaligned");
}
