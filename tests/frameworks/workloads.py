"""Timed workloads: `workloads.py NAME` prints `ready`, then runs one burst for each line that it reads
and prints the burst's seconds. So two of them, one native, can take turns on one GPU."""
import sys
import time

import torch
from torch import nn

WIDTH, HEADS, LAYERS, WORDS = 768, 12, 12, 50257


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    """GPT-2 small: 124 million parameters."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.blocks(self.words(x) + self.places(places)))


class Bottleneck(nn.Module):
    def __init__(self, i, mid, o, stride):
        super().__init__()

        def conv(a, b, size, step=1):
            return nn.Sequential(nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b))

        self.path = nn.Sequential(
            conv(i, mid, 1), nn.ReLU(True), conv(mid, mid, 3, stride), nn.ReLU(True), conv(mid, o, 1)
        )
        self.short = nn.Identity() if i == o and stride == 1 else conv(i, o, 1, stride)

    def forward(self, x):
        return torch.relu(self.path(x) + self.short(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate([3, 4, 6, 3]):
        mid = 64 << stage
        for block in range(count):
            layers.append(Bottleneck(width, mid, 4 * mid, 2 if stage and not block else 1))
            width = 4 * mid
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def training(model, x, labels, steps):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def burst():
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(x)
            loss = nn.functional.cross_entropy(out.float().view(-1, out.shape[-1]), labels.view(-1))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

    return burst


def gpt2_small():
    words = torch.randint(0, WORDS, (8, 513), device="cuda")
    return training(Gpt2().cuda(), words[:, :-1].contiguous(), words[:, 1:].contiguous(), 5)


def resnet50_step():
    images = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    model = resnet50().cuda().to(memory_format=torch.channels_last)
    return training(model, images, torch.randint(0, 1000, (64,), device="cuda"), 5)


def sgemm_512():
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    out = torch.empty_like(a)

    def burst():
        for _ in range(2000):
            torch.mm(a, b, out=out)

    return burst


def small_kernels():
    x = torch.zeros(1024, device="cuda")

    def burst():
        for _ in range(10000):
            x.add_(1.0)

    return burst


NAMES = {"gpt2_small_bf16_step": gpt2_small, "resnet50_bf16_step": resnet50_step, "sgemm_512_loop": sgemm_512, "small_kernel_loop": small_kernels}

if __name__ == "__main__":
    torch.manual_seed(0)
    burst = NAMES[sys.argv[1]]()
    for _ in range(3):
        burst()
    torch.cuda.synchronize()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        burst()
        torch.cuda.synchronize()
        print(time.perf_counter() - begin, flush=True)
