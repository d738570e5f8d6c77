// What the programs have in common that count steps for the tests of checkpoints: a nonce, drawn at
// the start, which is printed with each step, as steps.c does. Usage of them all: PROGRAM STEPS
// MILLISECONDS
#pragma once
#include "../programs/check.h"
#include <sys/random.h>
#include <time.h>

struct Steps {
    uint32_t count, between, nonce = 0;

    Steps(int argc, char **argv, uint32_t usual) : count(argc > 1 ? atoi(argv[1]) : usual), between(argc > 2 ? atoi(argv[2]) : 5)
    {
        REQUIRE(getrandom(&nonce, sizeof nonce, 0) == sizeof nonce);
        std::printf("nonce %08x\n", nonce);
        std::fflush(stdout);
    }

    void done(uint32_t number) const
    {
        std::printf("%08x %u\n", nonce, number);
        std::fflush(stdout);
    }

    void rest() const
    {
        timespec time = {between / 1000, (between % 1000) * 1000000L};
        nanosleep(&time, nullptr);
    }

    // The status that tells a program which has come to its end from one that has failed.
    int well() const
    {
        std::printf("%08x well\n", nonce);
        return 7;
    }
};

// A number of each of two ranks, which depends on what both had before.
struct Pair {
    uint32_t ranks[2] = {1, 2};

    __host__ __device__ static uint32_t next(uint32_t mine, uint32_t other, uint32_t step) { return mine * 31 + other * 17 + step; }

    void step(uint32_t number)
    {
        uint32_t before[2] = {ranks[0], ranks[1]};
        for (int rank = 0; rank < 2; rank++) ranks[rank] = next(before[rank], before[1 - rank], number);
    }
};
