"""A small transformer in bfloat16 autocast, deterministic: the losses are printed bit by bit."""
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn

torch.manual_seed(2)
torch.use_deterministic_algorithms(True)
STEPS = int(os.environ.get("STEPS", "50"))
WIDTH, HEADS, LAYERS, LENGTH, WORDS = 256, 8, 4, 128, 1000


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
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1).to(v.dtype) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


embed = nn.Embedding(WORDS, WIDTH)
model = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
embed, model = embed.cuda(), model.cuda()
optimiser = torch.optim.AdamW([*embed.parameters(), *model.parameters()], lr=3e-4)
for step in range(STEPS):
    words = torch.randint(0, WORDS, (16, LENGTH + 1), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(embed(words[:, :-1]))
    loss = nn.functional.cross_entropy(out.float().flatten(0, 1), words[:, 1:].flatten())
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
    if step % 10 == 0 or step == STEPS - 1:
        print(step, loss.item().hex())
