// The program's view of managed memory under its own madvise and mprotect, beside other threads and
// in children: what was written is there, and nobody waits for ever.
#include "check.h"
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

constexpr int WORDS = 1024; // of a page
constexpr int PAGES = 600;

__global__ void add(int *p, int n, int by)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += by;
}

// Each page has been written by the host, read by it, or by neither since the kernel.
static int *mixed()
{
    int *p;
    CUDA(cudaMallocManaged(&p, PAGES * WORDS * sizeof(int)));
    for (int i = 0; i < PAGES * WORDS; i++) p[i] = i;
    add<<<4, 64>>>(p, PAGES * WORDS, 1);
    CUDA(cudaDeviceSynchronize());
    for (int page = 0; page < PAGES; page++) {
        if (page % 3 == 0) p[page * WORDS] += 100;
        if (page % 3 == 1) REQUIRE(p[page * WORDS] == page * WORDS + 1);
    }
    return p;
}

static void all_there(const int *p, int more)
{
    for (int page = 0; page < PAGES; page++) {
        int expected = page * WORDS + 1 + more;
        REQUIRE(p[page * WORDS] == expected + (page % 3 == 0 ? 100 : 0));
        REQUIRE(p[page * WORDS + WORDS - 1] == expected + WORDS - 1);
    }
}

// Shared memory keeps its bytes when a program lets go of its pages.
static void let_go()
{
    int *p = mixed();
    REQUIRE(madvise(p, PAGES * WORDS * sizeof(int), MADV_DONTNEED) == 0);
    all_there(p, 0);
    REQUIRE(madvise(p + 10 * WORDS, 50 * WORDS * sizeof(int), MADV_DONTNEED) == 0);
    std::thread other([=] { all_there(p, 0); });
    all_there(p, 0);
    other.join();
    add<<<4, 64>>>(p, PAGES * WORDS, 5);
    CUDA(cudaDeviceSynchronize());
    all_there(p, 5);
    CUDA(cudaFree(p));
}

static sigjmp_buf back;

static void caught(int) { siglongjmp(back, 1); }

// Memory that the program has protected is a fault of its own.
static void protect()
{
    int *p = mixed();
    struct sigaction action = {}, before;
    action.sa_handler = caught;
    sigemptyset(&action.sa_mask);
    REQUIRE(sigaction(SIGSEGV, &action, &before) == 0);
    REQUIRE(mprotect(p, 9 * WORDS * sizeof(int), PROT_READ) == 0);
    volatile int faults = 0;
    for (volatile int page = 0; page < 9; page++) {
        if (sigsetjmp(back, 1)) faults++;
        else ((volatile int *)p)[page * WORDS] = -1;
    }
    REQUIRE(faults == 9);
    REQUIRE(mprotect(p, 9 * WORDS * sizeof(int), PROT_READ | PROT_WRITE) == 0);
    REQUIRE(sigaction(SIGSEGV, &before, nullptr) == 0);
    all_there(p, 0);
    CUDA(cudaFree(p));
}

// A child has no such memory: a touch ends it, and it does not wait for what nobody serves.
static void children()
{
    int *p = mixed();
    for (int touches = 0; touches < 2; touches++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            alarm(20);
            signal(SIGSEGV, SIG_DFL);
            signal(SIGBUS, SIG_DFL);
            _exit(touches ? ((volatile int *)p)[2 * WORDS] & 1 : 40);
        }
        all_there(p, touches);
        add<<<4, 64>>>(p, PAGES * WORDS, 1);
        int status;
        REQUIRE(waitpid(child, &status, 0) == child);
        if (!touches) REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 40);
        else REQUIRE(!WIFSIGNALED(status) || WTERMSIG(status) != SIGALRM);
        CUDA(cudaDeviceSynchronize());
    }
    all_there(p, 2);
    CUDA(cudaFree(p));
}

int main()
{
    let_go();
    protect();
    children();
    OK("%d pages", PAGES);
}
