"""Out of memory is an error that a program survives; the allocator's statistics; expandable segments."""
import os

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch

free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
try:
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    raise SystemExit("more memory than there is")
except torch.cuda.OutOfMemoryError:
    pass
kept = [torch.full((1 << 20,), i, device="cuda", dtype=torch.int32) for i in range(64)]
assert all(t[-1].item() == i for i, t in enumerate(kept))
assert torch.cuda.memory_allocated() >= 64 << 22
del kept
torch.cuda.empty_cache()
x = torch.arange(1 << 26, device="cuda", dtype=torch.int32)
assert x[-1].item() == (1 << 26) - 1
print("memory ok")
