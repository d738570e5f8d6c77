"""torch.compile: Triton's code in place of eager kernels."""
import torch


@torch.compile
def f(x, y):
    return (x.sin() * y.exp()).softmax(-1).sum(0)


torch.manual_seed(6)
x, y = torch.randn(512, 1000, device="cuda"), torch.randn(512, 1000, device="cuda")
expected = (x.cpu().sin() * y.cpu().exp()).softmax(-1).sum(0)
assert torch.allclose(f(x, y).cpu(), expected, atol=1e-4)
print("compile ok")
