// Conditional nodes: if, else, while and switch, nested and in a child graph; conditions set by
// kernels.
#include "check.h"

__global__ void decide(cudaGraphConditionalHandle condition, const int *value)
{
    cudaGraphSetConditional(condition, *value);
}

__global__ void add(int *sum, int amount) { *sum += amount; }

// Counts down, and keeps the loop going for as long as there is something left.
__global__ void count_down(cudaGraphConditionalHandle condition, int *left, int *rounds)
{
    ++*rounds;
    if (--*left <= 0) cudaGraphSetConditional(condition, 0);
}

template <typename... Args>
static cudaGraphNode_t kernel(cudaGraph_t graph, const cudaGraphNode_t *after, void (*f)(Args...), Args... args)
{
    void *list[] = {&args...};
    cudaKernelNodeParams params = {};
    params.func = (void *)f, params.gridDim = dim3(1), params.blockDim = dim3(1), params.kernelParams = list;
    cudaGraphNode_t node;
    CUDA(cudaGraphAddKernelNode(&node, graph, after, after ? 1 : 0, &params));
    return node;
}

// A conditional node of `size` bodies, which come back.
static cudaGraph_t *conditional(cudaGraph_t graph, const cudaGraphNode_t *after, cudaGraphConditionalHandle handle,
                                cudaGraphConditionalNodeType type, unsigned size, cudaGraphNode_t *node)
{
    cudaGraphNodeParams params = {cudaGraphNodeTypeConditional};
    params.conditional.handle = handle, params.conditional.type = type, params.conditional.size = size;
    CUDA(cudaGraphAddNode(node, graph, after, nullptr, after ? 1 : 0, &params));
    return params.conditional.phGraph_out;
}

static int read(const int *from)
{
    int value;
    CUDA(cudaMemcpy(&value, from, 4, cudaMemcpyDeviceToHost));
    return value;
}

static void write(int *to, int value) { CUDA(cudaMemcpy(to, &value, 4, cudaMemcpyHostToDevice)); }

static cudaGraphExec_t exec_of(cudaGraph_t graph)
{
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    return exec;
}

// If and else, and what comes after them.
static void if_else(int *value, int *sum)
{
    cudaGraph_t graph;
    CUDA(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle handle;
    CUDA(cudaGraphConditionalHandleCreate(&handle, graph));
    cudaGraphNode_t first = kernel<cudaGraphConditionalHandle, const int *>(graph, nullptr, decide, handle, value), node;
    cudaGraph_t *bodies = conditional(graph, &first, handle, cudaGraphCondTypeIf, 2, &node);
    kernel<int *, int>(bodies[0], nullptr, add, sum, 1);
    kernel<int *, int>(bodies[1], nullptr, add, sum, 10);
    kernel<int *, int>(graph, &node, add, sum, 100);
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(node, &type));
    REQUIRE(type == cudaGraphNodeTypeConditional);
    EXPECT(cudaErrorInvalidValue, cudaGraphDestroy(bodies[0]));
    cudaGraphExec_t exec = exec_of(graph);
    CUDA(cudaGraphDestroy(graph));
    int expected = 0;
    for (int round : {0, 1, 7, 0}) {
        write(value, round);
        CUDA(cudaGraphLaunch(exec, 0));
        expected += round ? 101 : 110;
        REQUIRE(read(sum) == expected);
    }
    CUDA(cudaGraphLaunch(exec, 0));
    CUDA(cudaGraphExecDestroy(exec));  // A launch under way is carried out.
    REQUIRE(read(sum) == expected + 110);
}

// A loop that begins by default, and one inside of it, in a child graph.
static void loops(int *left, int *rounds, int *sum)
{
    cudaGraph_t graph, child;
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphCreate(&child, 0));
    cudaGraphConditionalHandle outer, inner;
    CUDA(cudaGraphConditionalHandleCreate(&outer, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNode_t node;
    cudaGraph_t body = *conditional(graph, nullptr, outer, cudaGraphCondTypeWhile, 1, &node);
    CUDA(cudaGraphConditionalHandleCreate(&inner, body));
    cudaGraphNode_t round = kernel<cudaGraphConditionalHandle, int *, int *>(body, nullptr, count_down, outer, left, rounds);
    cudaGraphNode_t choice = kernel<cudaGraphConditionalHandle, const int *>(body, &round, decide, inner, rounds);
    cudaGraph_t *cases = conditional(body, &choice, inner, cudaGraphCondTypeSwitch, 3, &node);
    for (int i = 0; i < 3; i++) kernel<int *, int>(cases[i], nullptr, add, sum, i == 0 ? 1000000 : 1000 * i);
    kernel<int *, int>(child, nullptr, add, sum, 1);
    cudaGraphNode_t in_body;
    CUDA(cudaGraphAddChildGraphNode(&in_body, body, &node, 1, child));
    CUDA(cudaGraphDestroy(child));
    cudaGraphExec_t exec = exec_of(graph);
    for (int count : {5, 1, 2}) {
        write(left, count), write(rounds, 0), write(sum, 0);
        CUDA(cudaGraphLaunch(exec, 0));
        REQUIRE(read(rounds) == count && read(left) == 0);
        REQUIRE(read(sum) == count + 1000 + (count > 1 ? 2000 : 0));
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

// Conditions get their defaults once a launch, those of a body's too, however often the body runs.
static void defaults(int *left, int *rounds, int *sum)
{
    cudaGraph_t graph;
    CUDA(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle outer, inner;
    CUDA(cudaGraphConditionalHandleCreate(&outer, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNode_t loop, node;
    cudaGraph_t body = *conditional(graph, nullptr, outer, cudaGraphCondTypeWhile, 1, &loop);
    CUDA(cudaGraphConditionalHandleCreate(&inner, body, 1, cudaGraphCondAssignDefault));
    cudaGraphNode_t round = kernel<cudaGraphConditionalHandle, int *, int *>(body, nullptr, count_down, outer, left, rounds);
    cudaGraph_t once = *conditional(body, &round, inner, cudaGraphCondTypeIf, 1, &node);
    kernel<int *, int>(once, nullptr, add, sum, 1);
    kernel<cudaGraphConditionalHandle, const int *>(body, &node, decide, inner, sum + 1);
    cudaGraphExec_t exec = exec_of(graph);
    for (int launch = 0; launch < 2; launch++) {
        write(left, 4), write(rounds, 0), write(sum, 0), write(sum + 1, 0);
        CUDA(cudaGraphLaunch(exec, 0));
        REQUIRE(read(rounds) == 4 && read(sum) == 1);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
}

// An update takes the new graph's condition, its default and what its bodies do.
static void updated(int *left, int *rounds, int *sum)
{
    cudaGraphExec_t exec = nullptr;
    for (int version = 1; version <= 3; version++) {
        cudaGraph_t graph;
        CUDA(cudaGraphCreate(&graph, 0));
        cudaGraphConditionalHandle again, choice;
        bool by_default = version != 3;
        CUDA(cudaGraphConditionalHandleCreate(&again, graph, by_default, by_default ? cudaGraphCondAssignDefault : 0));
        CUDA(cudaGraphConditionalHandleCreate(&choice, graph));
        cudaGraphNode_t loop, first, node;
        // The third one's condition is set by a kernel, so that all three have one.
        first = kernel<cudaGraphConditionalHandle, const int *>(graph, nullptr, decide, by_default ? choice : again, left);
        cudaGraph_t body = *conditional(graph, &first, again, cudaGraphCondTypeWhile, 1, &loop);
        kernel<cudaGraphConditionalHandle, int *, int *>(body, nullptr, count_down, again, left, rounds);
        cudaGraphNode_t chosen = kernel<cudaGraphConditionalHandle, const int *>(graph, &loop, decide, choice, rounds);
        cudaGraph_t *bodies = conditional(graph, &chosen, choice, cudaGraphCondTypeIf, 1, &node);
        kernel<int *, int>(bodies[0], nullptr, add, sum, version);
        if (exec == nullptr) {
            exec = exec_of(graph);
        } else {
            cudaGraphExecUpdateResultInfo info = {};
            CUDA(cudaGraphExecUpdate(exec, graph, &info));
            REQUIRE(info.result == cudaGraphExecUpdateSuccess);
        }
        CUDA(cudaGraphDestroy(graph));
        for (int count : {4, 2}) {
            write(left, count), write(rounds, 0), write(sum, 0);
            CUDA(cudaGraphLaunch(exec, 0));
            REQUIRE(read(rounds) == count && read(left) == 0 && read(sum) == version);
        }
    }
    CUDA(cudaGraphExecDestroy(exec));
}

// What there may not be.
static void refused(int *value)
{
    cudaGraph_t graph, other;
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphCreate(&other, 0));
    cudaGraphConditionalHandle handle;
    CUDA(cudaGraphConditionalHandleCreate(&handle, graph));
    cudaGraphNodeParams params = {cudaGraphNodeTypeConditional};
    params.conditional.handle = handle, params.conditional.type = cudaGraphCondTypeWhile, params.conditional.size = 2;
    cudaGraphNode_t node;
    EXPECT(cudaErrorInvalidValue, cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &params));
    params.conditional.size = 1;
    EXPECT(cudaErrorInvalidValue, cudaGraphAddNode(&node, other, nullptr, nullptr, 0, &params));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaGraphDestroy(other));
}

int main()
{
    Device<int> words(5);
    CUDA(cudaMemset(words, 0, 20));
    if_else(words.data, words.data + 1);
    loops(words.data + 1, words.data + 2, words.data + 3);
    defaults(words.data + 1, words.data + 2, words.data + 3);
    updated(words.data + 1, words.data + 2, words.data + 3);
    refused(words.data);
    OK("if, else, while and switch, and updates of them");
}
