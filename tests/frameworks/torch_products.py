"""Products in every precision, against float64 on the host: cuBLAS and cuBLASLt."""
import torch

torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = False
SHAPES = [(64, 64, 64), (1024, 1536, 512), (4096, 4096, 4096)]
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

for dtype, limit in LIMITS.items():
    for m, k, n in SHAPES:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        # A few rows tell as much as all of them, and the host is slow.
        rows = torch.arange(0, m, max(1, m // 16))
        expected = a[rows].double() @ b.double()
        found = (a.cuda() @ b.cuda()).cpu()[rows].double()
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < limit, (dtype, m, k, n, error)
        bias = torch.randn(n).to(dtype)
        found = torch.addmm(bias.cuda(), a.cuda(), b.cuda()).cpu()[rows].double()
        error = ((found - expected - bias.double()).norm() / expected.norm()).item()
        assert error < limit, ("addmm", dtype, m, k, n, error)
        print(dtype, m, k, n, "ok")
