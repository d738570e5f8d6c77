// Integer instructions: wide and high products, division, bit fields, permutes, dot products.
#include "check.h"

struct Out {
    unsigned mulhi, umod, brev, popc, clz, ffs, prmt, funnel, sad, add128;
    int mulhis, div, rem, mul24, dp4a, vmax, shift;
    long long div64, rem64, mulhi64, ffsll;
    unsigned long long brev64, umulhi64;
};

__global__ void run(const unsigned *a, const unsigned *b, Out *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = a[i], y = b[i];
    long long p = (long long)((unsigned long long)x << 32 | y), q = (long long)(int)y | 1;
    Out o;
    o.mulhi = __umulhi(x, y), o.umod = x % (y | 1), o.brev = __brev(x), o.popc = __popc(x), o.clz = __clz(x);
    o.ffs = __ffs(x), o.prmt = __byte_perm(x, y, 0x2705), o.funnel = __funnelshift_l(x, y, i), o.sad = __usad(x, y, 5);
    o.mulhis = __mulhi((int)x, (int)y), o.div = (int)x / ((int)y | 1), o.rem = (int)x % ((int)y | 1);
    o.mul24 = __mul24((int)x, (int)y), o.dp4a = __dp4a((int)x, (int)y, i), o.vmax = __vmaxs2(x, y);
    o.shift = (int)x >> (y & 31);
    o.div64 = p / q, o.rem64 = p % q, o.mulhi64 = __mul64hi(p, q), o.ffsll = __ffsll(p);
    o.brev64 = __brevll(p), o.umulhi64 = __umul64hi((unsigned long long)p, (unsigned long long)q * 3);
    unsigned carry, low;
    asm("add.cc.u32 %0, %2, %3; addc.u32 %1, %2, 0;" : "=r"(low), "=r"(carry) : "r"(x), "r"(y));
    o.add128 = carry ^ low;
    out[i] = o;
}

static unsigned reverse(unsigned x)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}

int main()
{
    const int n = 3000;
    Random random(42);
    std::vector<unsigned> a(n), b(n);
    for (auto &x : a) x = random.next() >> random.below(20);
    for (auto &x : b) x = random.next() >> random.below(20);
    Device<unsigned> da(a), db(b);
    Device<Out> out(n);
    run<<<(n + 255) / 256, 256>>>(da, db, out, n);
    auto got = out.host();
    for (int i = 0; i < n; i++) {
        unsigned x = a[i], y = b[i];
        int sx = int(x), sy = int(y);
        const Out &o = got[i];
        long long p = (long long)((unsigned long long)x << 32 | y), q = (long long)sy | 1;
        REQUIRE(o.mulhi == unsigned((uint64_t)x * y >> 32) && o.umod == x % (y | 1) && o.brev == reverse(x));
        REQUIRE(o.popc == (unsigned)__builtin_popcount(x) && o.clz == (x ? (unsigned)__builtin_clz(x) : 32));
        REQUIRE(o.ffs == (unsigned)__builtin_ffs(x));
        unsigned char bytes[8];
        for (int k = 0; k < 4; k++) bytes[k] = x >> 8 * k, bytes[4 + k] = y >> 8 * k;
        REQUIRE(o.prmt == (unsigned(bytes[5]) | bytes[0] << 8 | bytes[7] << 16 | unsigned(bytes[2]) << 24));
        REQUIRE(o.funnel == unsigned((((uint64_t)y << 32 | x) << (i & 31)) >> 32));
        REQUIRE(o.sad == (x > y ? x - y : y - x) + 5);
        REQUIRE(o.mulhis == int((int64_t)sx * sy >> 32) && o.div == int((int64_t)sx / (sy | 1)) && o.rem == int((int64_t)sx % (sy | 1)));
        auto low24 = [](int v) { return (v << 8) >> 8; };
        REQUIRE(o.mul24 == int(int64_t(low24(sx)) * low24(sy)));
        int dot = i, most = 0;
        for (int k = 0; k < 4; k++) dot += int((signed char)bytes[k]) * (signed char)bytes[4 + k];
        for (int k = 0; k < 2; k++) most |= int((unsigned short)std::max(short(x >> 16 * k), short(y >> 16 * k))) << 16 * k;
        REQUIRE(o.dp4a == dot && o.vmax == most && o.shift == sx >> (y & 31));
        if (!(p == INT64_MIN && q == -1)) REQUIRE(o.div64 == p / q && o.rem64 == p % q);
        REQUIRE(o.mulhi64 == (long long)((__int128)p * q >> 64) && o.ffsll == __builtin_ffsll(p));
        REQUIRE(o.brev64 == ((unsigned long long)reverse(y) << 32 | reverse(x)));
        REQUIRE(o.umulhi64 == (unsigned long long)((unsigned __int128)(unsigned long long)p * ((unsigned long long)q * 3) >> 64));
        uint64_t sum = (uint64_t)x + y;
        REQUIRE(o.add128 == (unsigned(sum) ^ (x + unsigned(sum >> 32))));
    }
    OK("%d pairs, 22 results each", n);
}
