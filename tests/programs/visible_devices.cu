// devices: 4
// CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: each case is a process of its own, which names the
// devices that it sees and computes on each.
#include "check.h"
#include <algorithm>
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

using Lines = std::vector<std::string>;

__global__ void square(int *p) { p[threadIdx.x] *= p[threadIdx.x]; }

static std::string uuid(int device)
{
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, device));
    std::string text = "GPU-";
    for (int i = 0; i < 16; i++) {
        char hex[4];
        std::snprintf(hex, sizeof hex, "%02x", (unsigned char)properties.uuid.bytes[i]);
        text += (i == 4 || i == 6 || i == 8 || i == 10) ? std::string("-") + hex : hex;
    }
    return text;
}

static void compute(int device)
{
    CUDA(cudaSetDevice(device));
    Device<int> d(std::vector<int>(32, device + 3));
    square<<<1, 32>>>(d);
    for (int x : d.host()) REQUIRE(x == (device + 3) * (device + 3));
}

// What a process of a case does: prints a line for each device, or the error.
static int child(const char *own)
{
    if (own) setenv("CUDA_VISIBLE_DEVICES", own, 1);
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        std::printf("%s\n", cudaGetErrorName(error));
        // Asked again, it says the same.
        return cudaGetDeviceCount(&count) == error ? 0 : 1;
    }
    for (int device = 0; device < count; device++) {
        compute(device);
        int bus;
        CUDA(cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device));
        std::printf("%s %d\n", uuid(device).c_str(), bus);
    }
    EXPECT(cudaErrorInvalidDevice, cudaSetDevice(count));
    return 0;
}

// The lines of a process with this environment; NULL leaves a variable unset. `own`: it sets
// CUDA_VISIBLE_DEVICES itself, before it uses CUDA.
static Lines run(const char *visible, const char *order = nullptr, const char *own = nullptr)
{
    int out[2];
    REQUIRE(pipe(out) == 0);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        visible ? setenv("CUDA_VISIBLE_DEVICES", visible, 1) : unsetenv("CUDA_VISIBLE_DEVICES");
        order ? setenv("CUDA_DEVICE_ORDER", order, 1) : unsetenv("CUDA_DEVICE_ORDER");
        dup2(out[1], 1);
        execl("/proc/self/exe", "visible_devices", "child", own, nullptr);
        _exit(9);
    }
    close(out[1]);
    std::string text;
    char part[256];
    for (ssize_t n; (n = read(out[0], part, sizeof part)) > 0;) text.append(part, n);
    close(out[0]);
    int status;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        std::printf("CUDA_VISIBLE_DEVICES=%s: %s", visible ? visible : own, text.c_str());
        std::exit(1);
    }
    Lines lines;
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
        lines.push_back(text.substr(at, end - at));
    return lines;
}

static Lines every;

// The devices `wanted` are seen, in this order; where there are none, `error`.
static void expect(const std::string &list, const std::vector<int> &wanted,
                   const char *error = "cudaErrorNoDevice")
{
    Lines lines = wanted.empty() ? Lines{error} : Lines{};
    for (int device : wanted) lines.push_back(every[device]);
    for (bool own : {false, true}) {
        Lines seen = own ? run(nullptr, nullptr, list.c_str()) : run(list.c_str());
        if (seen == lines) continue;
        std::printf("CUDA_VISIBLE_DEVICES=%s shows", list.c_str());
        for (auto &line : seen) std::printf(" %s", line.c_str());
        std::printf("\n");
        std::exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) return child(argc > 2 ? argv[2] : nullptr);
    every = run(nullptr);
    REQUIRE(!every.empty() && every[0].substr(0, 4) == "GPU-");
    auto id = [](int device) { return every[device].substr(0, every[device].find(' ')); };
    auto beyond = std::to_string(every.size());

    // The programming guide's rules, and what driver 580 does where it is silent.
    expect("0", {0});
    expect("", {});
    expect("-1", {});
    expect(beyond, {});
    expect("0," + beyond, {0});
    expect("0,nonsense,0", {0});
    expect("nonsense", {});
    expect("0,0", {}, "cudaErrorInvalidDevice");
    expect(" 0 ", {0});
    expect("+0x", {0});
    expect("0,,0", {0});
    expect(",0", {});
    expect(id(0), {0});
    expect(id(0) + "," + id(0), {}, "cudaErrorInvalidDevice");
    expect(id(0) + "and more", {0});
    expect(" " + id(0), {});
    expect(id(0).substr(4), {});
    // Numbers and UUIDs do not mix.
    expect("0," + id(0), {0});
    expect(id(0) + ",0", {0});
    expect("0,MIG-" + id(0) + "/0/0", {0});
    if (every.size() >= 4) {
        expect("2,1", {2, 1});
        expect("0,2,-1,1", {0, 2});
        expect("1," + beyond + ",0", {1});
        expect("0,1,2,1", {}, "cudaErrorInvalidDevice");
        expect(id(3) + "," + id(0), {3, 0});
        expect("GPU-", {});
        expect(id(2) + ",GPU-none," + id(1), {2});
    }

    // By bus number, whatever is fastest; then numbers count in that order.
    Lines by_bus = run(nullptr, "PCI_BUS_ID");
    auto bus = [](const std::string &line) { return std::stoi(line.substr(line.find(' '))); };
    REQUIRE(by_bus.size() == every.size());
    REQUIRE(std::is_sorted(by_bus.begin(), by_bus.end(),
                           [&](auto &a, auto &b) { return bus(a) < bus(b); }));
    if (every.size() >= 2) {
        REQUIRE((run("1,0", "PCI_BUS_ID") == Lines{by_bus[1], by_bus[0]}));
        REQUIRE((run("1,0", "FASTEST_FIRST") == Lines{every[1], every[0]}));
    }
    OK("%zu devices", every.size());
}
