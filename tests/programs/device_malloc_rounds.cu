// Kernels that allocate on the device and free it all themselves, round after round: between two of
// them nothing is on the device's heap, and the program can be checkpointed.
#include "check.h"
#include <unistd.h>

__global__ void round_of(int n, unsigned long long *sum)
{
    struct Node { Node *next; int value; };
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    Node *head = nullptr;
    for (int i = 0; i < n; i++) {
        Node *node = (Node *)malloc(sizeof(Node) + 8 * (t % 50));
        if (!node) break;
        node->next = head;
        node->value = t + i;
        head = node;
    }
    unsigned long long mine = 0;
    while (head) {
        Node *next = head->next;
        mine += head->value;
        free(head);
        head = next;
    }
    atomicAdd(sum, mine);
}

int main()
{
    const int rounds = 50, blocks = 4, threads = 64, n = 10;
    CUDA(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
    Device<unsigned long long> sum(1);
    CUDA(cudaMemset(sum, 0, 8));
    for (int i = 0; i < rounds; i++) {
        round_of<<<blocks, threads>>>(n, sum);
        CUDA(cudaDeviceSynchronize());
        usleep(5000);
    }
    unsigned long long all = blocks * threads, expected = n * all * (all - 1) / 2 + all * n * (n - 1) / 2;
    REQUIRE(sum.host()[0] == rounds * expected);
    OK("%d rounds", rounds);
}
