// Times short driver calls and copies: for each line on standard input one line of JSON, a name
// with the median in microseconds (calls) or the rate in GB/s (copies). `scripts/gpu-near` runs two
// of it by turns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define CUDA(call) do { cudaError_t e = (call); if (e != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorName(e)); exit(1); } } while (0)

__global__ void null() {}

// Of one of `batch` calls; what comes after them does not count.
static double median(int samples, int batch, const std::function<void()> &body, const std::function<void()> &after = [] {})
{
    std::vector<double> all;
    body();
    for (int s = 0; s < samples; s++) {
        auto begin = std::chrono::steady_clock::now();
        for (int b = 0; b < batch; b++) body();
        all.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / batch);
        after();
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

// A graph of one null kernel.
static cudaGraphExec_t graph_of_one()
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    null<<<1, 32, 0, stream>>>();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    return exec;
}

static const char *separator = "{";

static void say(const char *name, const char *size, double value)
{
    printf("%s\"%s%s%s\": %.6g", separator, name, *size ? " " : "", size, value);
    separator = ", ";
}

struct Size { const char *name; size_t bytes; int samples, batch; };

int main(int argc, char **argv)
{
    size_t most = (argc > 1 ? atoll(argv[1]) : 1024) << 20;
    const Size sizes[] = {{"4 KiB", 4 << 10, 40, 1}, {"64 KiB", 64 << 10, 40, 1}, {"1 MiB", 1 << 20, 20, 1},
                          {"16 MiB", 16 << 20, 5, 1}, {"256 MiB", 256 << 20, 3, 1}, {"1 GiB", 1ull << 30, 1, 1}};
    char *here, *there, *pinned, *pageable;
    CUDA(cudaMalloc(&here, most));
    CUDA(cudaMalloc(&there, most));
    CUDA(cudaMallocHost(&pinned, most));
    pageable = (char *)malloc(most);
    memset(pinned, 1, most);
    memset(pageable, 1, most);
    CUDA(cudaMemset(here, 0, most));
    cudaEvent_t event;
    cudaStream_t other;
    CUDA(cudaEventCreate(&event));
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaGraphExec_t graph = graph_of_one();
    CUDA(cudaDeviceSynchronize());
    puts("ready");
    fflush(stdout);
    for (char line[80]; fgets(line, sizeof line, stdin);) {
        separator = "{";
        say("launch and synchronize", "", 1e6 * median(300, 1, [] { null<<<1, 32>>>(); CUDA(cudaDeviceSynchronize()); }));
        say("launch and stream synchronize", "", 1e6 * median(300, 1, [] { null<<<1, 32>>>(); CUDA(cudaStreamSynchronize(0)); }));
        say("launch, record, event synchronize", "", 1e6 * median(300, 1, [&] {
            null<<<1, 32>>>(); CUDA(cudaEventRecord(event)); CUDA(cudaEventSynchronize(event)); }));
        say("synchronize when idle", "", 1e6 * median(50, 100, [] { CUDA(cudaDeviceSynchronize()); }));
        auto settle = [] { CUDA(cudaDeviceSynchronize()); };
        double burst = median(5, 1, [&] { for (int i = 0; i < 1000; i++) null<<<1, 32>>>(); settle(); });
        say("1000 launches and synchronize", "", 1e6 * burst);
        auto launch = [] { null<<<1, 32>>>(); };
        say("post a launch, one of 1000", "", 1e6 * median(5, 1000, launch, settle));
        say("post a launch, one of 100000", "", 1e6 * median(1, 100000, launch, settle));
        say("record an event", "", 1e6 * median(20, 64, [&] { CUDA(cudaEventRecord(event)); }, settle));
        say("have a stream wait for an event", "", 1e6 * median(20, 64, [&] { CUDA(cudaStreamWaitEvent(other, event, 0)); }, settle));
        say("record, and have another stream wait", "", 1e6 * median(20, 64, [&] {
            CUDA(cudaEventRecord(event)); CUDA(cudaStreamWaitEvent(other, event, 0)); }, settle));
        say("launch a graph", "", 1e6 * median(20, 64, [&] { CUDA(cudaGraphLaunch(graph, other)); }, settle));
        say("allocate and free in a stream", "", 1e6 * median(20, 64, [&] {
            void *memory;
            CUDA(cudaMallocAsync(&memory, 1 << 20, other)); CUDA(cudaFreeAsync(memory, other)); }, settle));
        say("allocate and free 1 MiB", "", 1e6 * median(20, 16, [] {
            void *memory;
            CUDA(cudaMalloc(&memory, 1 << 20)); CUDA(cudaFree(memory)); }));
        size_t filled = most < 256 << 20 ? most : 256 << 20;
        say("the processor fills pinned memory", "", filled / 1e9 / median(3, 1, [&] { memset(pinned, 2, filled); }));
        for (const Size &size : sizes) {
            size_t n = size.bytes;
            if (n > most) continue;
            auto rate = [&](const char *what, const std::function<void()> &body) {
                say(what, size.name, n / 1e9 / median(size.samples, size.batch, body));
            };
            rate("to device, pinned", [&] { CUDA(cudaMemcpy(here, pinned, n, cudaMemcpyHostToDevice)); });
            rate("to host, pinned", [&] { CUDA(cudaMemcpy(pinned, here, n, cudaMemcpyDeviceToHost)); });
            rate("inside", [&] { CUDA(cudaMemcpyAsync(there, here, n, cudaMemcpyDeviceToDevice)); settle(); });
            rate("to device, pageable", [&] { CUDA(cudaMemcpy(here, pageable, n, cudaMemcpyHostToDevice)); });
            rate("to host, pageable", [&] { CUDA(cudaMemcpy(pageable, here, n, cudaMemcpyDeviceToHost)); });
        }
        puts("}");
        fflush(stdout);
    }
}
