// A number that is drawn when a program starts and, where KEDGE_TELL_NONCE is set, told on standard
// error, then and when it ends: one that was restarted ends with the number that it began with.
// What a buffer holds would be told twice, so each line is one write.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <sys/random.h>
#include <unistd.h>

struct Nonce {
    unsigned long long drawn = 0;
    Nonce()
    {
        if (getrandom(&drawn, sizeof(drawn), 0) != (ssize_t)sizeof(drawn)) drawn = 0;
        tell("begins");
    }
    ~Nonce() { tell("ends"); }
    void tell(const char *what) const
    {
        if (!std::getenv("KEDGE_TELL_NONCE")) return;
        char line[64];
        int length = std::snprintf(line, sizeof(line), "nonce %016llx %s\n", drawn, what);
        // A program that has closed its standard error tells nothing.
        if (write(2, line, (size_t)length) < 0) return;
    }
};
inline Nonce nonce;
