"""A captured CUDA graph gives what eager mode gives; side streams, events and pinned copies."""
import torch

torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
static = torch.zeros(32, 128, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    for _ in range(3):
        model(static)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    out = model(static)
for _ in range(20):
    x = torch.randn(32, 128)
    static.copy_(x)
    graph.replay()
    with torch.no_grad():
        assert torch.allclose(out, model(x.cuda()), atol=1e-5)
host = torch.randn(1 << 22).pin_memory()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
there = host.cuda(non_blocking=True)
back = torch.empty_like(host, pin_memory=True)
back.copy_(there, non_blocking=True)
end.record()
end.synchronize()
assert torch.equal(back, host) and start.elapsed_time(end) > 0
print("graphs ok")
