"""cuFFT, cuSOLVER, cuSPARSE, cuRAND, sorting and reductions, against the host."""
import torch

torch.manual_seed(4)
x = torch.randn(64, 1000)
assert torch.allclose(torch.fft.fft(x.cuda()).cpu(), torch.fft.fft(x), atol=1e-3)
assert torch.allclose(torch.fft.irfft2(torch.fft.rfft2(x.cuda())).cpu(), x, atol=1e-4)
a = torch.randn(200, 200, dtype=torch.float64)
b = torch.randn(200, 3, dtype=torch.float64)
assert torch.allclose(torch.linalg.solve(a.cuda(), b.cuda()).cpu(), torch.linalg.solve(a, b), atol=1e-8)
spd = a @ a.T + 200 * torch.eye(200, dtype=torch.float64)
assert torch.allclose(torch.linalg.cholesky(spd.cuda()).cpu(), torch.linalg.cholesky(spd), atol=1e-8)
assert torch.allclose(torch.linalg.svdvals(a.cuda()).cpu(), torch.linalg.svdvals(a), atol=1e-8)
assert torch.allclose(torch.linalg.eigvalsh(spd.cuda()).cpu(), torch.linalg.eigvalsh(spd), atol=1e-7)
dense = (torch.rand(300, 300) > 0.95) * torch.randn(300, 300)
sparse = dense.cuda().to_sparse_csr()
assert torch.allclose((sparse @ torch.ones(300, 4, device="cuda")).cpu(), dense @ torch.ones(300, 4), atol=1e-4)
r = torch.randn(1_000_000, device="cuda")
assert abs(r.mean().item()) < 0.01 and abs(r.std().item() - 1) < 0.01
assert torch.equal(r.sort().values.cpu(), r.cpu().sort().values)
assert torch.equal(r.cumsum(0).argmax().cpu(), r.cumsum(0).cpu().argmax())
i = torch.randint(0, 1000, (100_000,))
assert torch.equal(torch.bincount(i.cuda(), minlength=1000).cpu(), torch.bincount(i, minlength=1000))
q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().cpu()
expected = torch.nn.functional.scaled_dot_product_attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), is_causal=True)
assert (found - expected).abs().max() < 0.05
print("libraries ok")
