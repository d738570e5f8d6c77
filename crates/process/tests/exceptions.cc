// As step.c, in C++: each step is thrown through many frames, with destructors, by threads that come and go.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <sys/random.h>
#include <thread>
#include <unistd.h>
#include <vector>

static std::atomic<int> alive{0};
struct Counted {
    Counted() { alive++; }
    ~Counted() { alive--; }
};
struct Step {
    int number;
    std::string text;
};

static void down(int depth, int number) {
    auto counted = std::make_unique<Counted>();
    if (depth == 0) throw Step{number, std::to_string(number)};
    down(depth - 1, number);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0;
    for (int number = 1; number <= steps; number++) {
        std::thread([&] {
            try {
                down(50, number);
            } catch (const Step &step) {
                if (step.text == std::to_string(number) && alive == 0) sum += 1.0 / step.number;
            }
        }).join();
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, number, sum, value);
        if (write(1, line, length) != length) return 2;
        usleep(2000);
    }
    return 7;
}
