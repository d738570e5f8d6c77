// What each program of this folder has in common: it checks its own results against the host's,
// and prints a line that begins with "ok" last.
#pragma once

#include <stdio.h>
#include <stdlib.h>

// A failure names its place and ends the program.
#define CHECK(what)                                                                              \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #what);                                    \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

// The same with what was found and what was expected.
#define SAME(found, expected)                                                                    \
    do {                                                                                         \
        double found_ = (double)(found), expected_ = (double)(expected);                         \
        if (found_ != expected_) {                                                               \
            printf("%s:%d: %s is %.17g, not %.17g\n", __FILE__, __LINE__, #found, found_,        \
                   expected_);                                                                   \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

// A step of a sequence that is the same everywhere.
static inline unsigned next_random(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static inline void *allocate(size_t bytes) {
    void *memory = malloc(bytes);
    CHECK(memory);
    return memory;
}
