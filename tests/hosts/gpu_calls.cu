// Steps in which the kernel reads managed memory for the program, over a pipe, as fast as it goes:
// a thread that waits for a page does so inside a system call most of the time. Prints as steps.c
// does. Usage: gpu_calls STEPS MILLISECONDS
#include "steps.h"
#include <unistd.h>

constexpr int WORDS = 1024; // of a page
constexpr int PAGES = 8;

__global__ void add(uint32_t *words, uint32_t by)
{
    words[blockIdx.x * blockDim.x + threadIdx.x] += by;
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 150);
    uint32_t *words, first[PAGES], expected = 0;
    CUDA(cudaMallocManaged(&words, PAGES * WORDS * sizeof(uint32_t)));
    for (int i = 0; i < PAGES * WORDS; i++) words[i] = i;
    int ends[2];
    if (pipe(ends) != 0) return 1;
    for (uint32_t number = 1; number <= steps.count; number++) {
        for (int round = 0; round < 20; round++) {
            add<<<PAGES * WORDS / 256, 256>>>(words, number);
            expected += number;
            for (int page = 0; page < PAGES; page++) {
                const ssize_t bytes = sizeof(uint32_t);
                if (write(ends[1], words + page * WORDS, bytes) != bytes) return 2;
                if (read(ends[0], first + page, bytes) != bytes) return 3;
                if (first[page] != page * WORDS + expected) return 4;
            }
        }
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
