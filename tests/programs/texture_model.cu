// Every form of tex on arrays of one and of several levels, at random coordinates, beside a model
// in plain C++.
#include "check.h"
#include <algorithm>

enum Geometry { D1, D2, D3, A1, A2 };
static const char *const NAMES[] = {"1d", "2d", "3d", "a1d", "a2d"};

struct Point { float x, y, z; int i, j, k, layer, level; float lod; };
// By coordinates that are floats at a level, integers, integers at a level, and without a level.
struct Got { float level, whole, whole_level, base; };

template <int G> __device__ Got fetch(cudaTextureObject_t t, const Point &p)
{
    Got g;
#define FOUR(geom, cf, ci)                                                                                 \
    asm volatile("{.reg .f32 a,b,c; tex.level." geom ".v4.f32.f32 {%0,a,b,c},[%1,{" cf "}],%9;}" : "=f"(g.level) \
                 : "l"(t), "f"(p.x), "f"(p.y), "f"(p.z), "r"(p.i), "r"(p.j), "r"(p.k), "r"(p.layer), "f"(p.lod));  \
    asm volatile("{.reg .f32 a,b,c; tex." geom ".v4.f32.s32 {%0,a,b,c},[%1,{" ci "}];}" : "=f"(g.whole)      \
                 : "l"(t), "f"(p.x), "f"(p.y), "f"(p.z), "r"(p.i), "r"(p.j), "r"(p.k), "r"(p.layer));       \
    asm volatile("{.reg .f32 a,b,c; tex.level." geom ".v4.f32.s32 {%0,a,b,c},[%1,{" ci "}],%9;}" : "=f"(g.whole_level) \
                 : "l"(t), "f"(p.x), "f"(p.y), "f"(p.z), "r"(p.i), "r"(p.j), "r"(p.k), "r"(p.layer), "r"(p.level));    \
    asm volatile("{.reg .f32 a,b,c; tex.base." geom ".v4.f32.f32 {%0,a,b,c},[%1,{" cf "}];}" : "=f"(g.base)  \
                 : "l"(t), "f"(p.x), "f"(p.y), "f"(p.z), "r"(p.i), "r"(p.j), "r"(p.k), "r"(p.layer));
    if constexpr (G == D1) { FOUR("1d", "%2", "%5") }
    if constexpr (G == D2) { FOUR("2d", "%2,%3", "%5,%6") }
    if constexpr (G == D3) { FOUR("3d", "%2,%3,%4,%4", "%5,%6,%7,%7") }
    if constexpr (G == A1) { FOUR("a1d", "%8,%2", "%8,%5") }
    if constexpr (G == A2) { FOUR("a2d", "%8,%2,%3,%3", "%8,%5,%6,%6") }
    return g;
}

template <int G> __global__ void ask(cudaTextureObject_t texture, const Point *points, Got *got, int count)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) got[at] = fetch<G>(texture, points[at]);
}

struct Level {
    int size[3];
    std::vector<float> values;
    // The third index is the layer of a layered array.
    float at(int x, int y, int z) const { return values[(size_t(z) * size[1] + y) * size[0] + x]; }
};

// An element's index, or -1 for the border.
static int folded(int index, int size, int mode)
{
    if (index >= 0 && index < size) return index;
    if (mode == cudaAddressModeBorder) return -1;
    if (mode == cudaAddressModeWrap) return ((index % size) + size) % size;
    return index < 0 ? 0 : size - 1;
}

static int nearest(float x, int size, int mode, bool normalized)
{
    if (normalized) {
        float whole = std::floor(x), part = x - whole;
        if (mode == cudaAddressModeWrap) x = part;
        if (mode == cudaAddressModeMirror) x = std::fmod(std::fabs(whole), 2.0f) == 1 ? 1 - part : part;
        x *= size;
    } else if (mode == cudaAddressModeWrap || mode == cudaAddressModeMirror) {
        mode = cudaAddressModeClamp;
    }
    return folded(int(std::floor(x)), size, mode);
}

static float model(const Level &level, int geometry, const Point &p, int mode, bool normalized)
{
    int at[3] = {nearest(p.x, level.size[0], mode, normalized), 0, 0};
    if (geometry == D2 || geometry == D3 || geometry == A2) at[1] = nearest(p.y, level.size[1], mode, normalized);
    if (geometry == D3) at[2] = nearest(p.z, level.size[2], mode, normalized);
    if (geometry == A1 || geometry == A2) at[2] = std::min(p.layer, level.size[2] - 1);
    if (at[0] < 0 || at[1] < 0 || at[2] < 0) return -7;
    return level.at(at[0], at[1], at[2]);
}

static int compared = 0;

template <int G> void compare(Random &random, int levels, int mode, bool normalized)
{
    bool layered = G == A1 || G == A2;
    int width = 5 + random.below(20), height = G == D1 || G == A1 ? 1 : 4 + random.below(20);
    int depth = G == D3 ? 3 + random.below(8) : layered ? 2 + random.below(4) : 1;
    auto extent = make_cudaExtent(width, height > 1 ? height : 0, depth > 1 || layered ? depth : 0);
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    unsigned flags = layered ? cudaArrayLayered : cudaArrayDefault;
    cudaMipmappedArray_t mipmap = nullptr;
    cudaArray_t single = nullptr;
    if (levels > 1) CUDA(cudaMallocMipmappedArray(&mipmap, &format, extent, levels, flags));
    else CUDA(cudaMalloc3DArray(&single, &format, extent, flags));
    std::vector<Level> all(levels);
    for (int number = 0; number < levels; number++) {
        Level &level = all[number];
        auto smaller = [&](int size) { return std::max(1, size >> number); };
        int sizes[3] = {smaller(width), smaller(height), layered ? depth : smaller(depth)};
        std::copy(sizes, sizes + 3, level.size);
        level.values.resize(size_t(sizes[0]) * sizes[1] * sizes[2]);
        for (float &value : level.values) value = 1 + random.below(1 << 20);
        cudaArray_t array = single;
        if (mipmap) CUDA(cudaGetMipmappedArrayLevel(&array, mipmap, number));
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = make_cudaPitchedPtr(level.values.data(), sizes[0] * sizeof(float), sizes[0], sizes[1]);
        copy.dstArray = array;
        copy.extent = make_cudaExtent(sizes[0], sizes[1], sizes[2]);
        copy.kind = cudaMemcpyHostToDevice;
        CUDA(cudaMemcpy3D(&copy));
    }
    cudaResourceDesc resource = {};
    resource.resType = mipmap ? cudaResourceTypeMipmappedArray : cudaResourceTypeArray;
    if (mipmap) resource.res.mipmap.mipmap = mipmap;
    else resource.res.array.array = single;
    cudaTextureDesc description = {};
    for (auto &one : description.addressMode) one = cudaTextureAddressMode(mode);
    description.normalizedCoords = normalized;
    description.maxMipmapLevelClamp = float(levels - 1);
    for (float &channel : description.borderColor) channel = -7;
    cudaTextureObject_t texture;
    CUDA(cudaCreateTextureObject(&texture, &resource, &description, nullptr));

    std::vector<Point> points(500);
    for (Point &p : points) {
        // Away from the seams between elements, where one rounding more or less decides.
        auto coordinate = [&](int size) {
            int index = int(random.below(3 * size)) - size;
            float within = index + 0.125f + 0.75f * random.uniform();
            return normalized ? within / size : within;
        };
        p.level = random.below(levels);
        p.lod = float(p.level);
        const Level &level = all[p.level];
        p.x = coordinate(level.size[0]), p.y = coordinate(level.size[1]), p.z = coordinate(level.size[2]);
        p.layer = layered ? random.below(depth) : 0;
        // Inside of the smallest level.
        const Level &last = all[levels - 1];
        p.i = random.below(last.size[0]), p.j = random.below(last.size[1]), p.k = layered ? 0 : random.below(last.size[2]);
    }
    Device<Point> asked(points);
    Device<Got> answers(points.size());
    ask<G><<<4, 128>>>(texture, asked, answers, int(points.size()));
    auto got = answers.host();
    for (size_t at = 0; at < points.size(); at++) {
        const Point &p = points[at];
        const Level &level = all[p.level];
        auto whole = [&](const Level &of) { return of.at(p.i, p.j, layered ? p.layer : p.k); };
        float expected[] = {model(level, G, p, mode, normalized), whole(all[0]), whole(level), model(all[0], G, p, mode, normalized)};
        float given[] = {got[at].level, got[at].whole, got[at].whole_level, got[at].base};
        // A coordinate that is away from the seams of its own level may be at one of the first's.
        int forms = normalized && p.level > 0 ? 3 : 4;
        for (int form = 0; form < forms; form++, compared++) {
            // By integers a 1-D texture is read of linear memory alone (tex1Dfetch): of an array an
            // H200 gives zeros.
            if (G == D1 && (form == 1 || form == 2)) continue;
            if (given[form] == expected[form]) continue;
            std::printf("%s, %d levels, mode %d, normalized %d, form %d at level %d (%g %g %g; %d %d %d; layer %d): %g, not %g\n",
                        NAMES[G], levels, mode, normalized, form, p.level, p.x, p.y, p.z, p.i, p.j, p.k, p.layer, given[form], expected[form]);
            std::exit(1);
        }
    }
    CUDA(cudaDestroyTextureObject(texture));
    if (mipmap) CUDA(cudaFreeMipmappedArray(mipmap));
    else CUDA(cudaFreeArray(single));
}

int main()
{
    Random random(22);
    for (int mode = 0; mode < 4; mode++) {
        for (bool normalized : {false, true}) {
            for (int levels = 1; levels <= (normalized ? 3 : 1); levels++) {
                compare<D1>(random, levels, mode, normalized);
                compare<D2>(random, levels, mode, normalized);
                compare<D3>(random, levels, mode, normalized);
                compare<A1>(random, levels, mode, normalized);
                compare<A2>(random, levels, mode, normalized);
            }
        }
    }
    OK("%d reads as the model's", compared);
}
