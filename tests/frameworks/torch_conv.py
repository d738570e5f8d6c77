"""Convolutions, batch norms and pooling by cuDNN: training steps of a small residual network."""
import torch
from torch import nn

torch.manual_seed(3)
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.benchmark = False


def layer(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


model = nn.Sequential(
    layer(3, 32), layer(32, 64), nn.MaxPool2d(2), layer(64, 128), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 10)
).cuda().to(memory_format=torch.channels_last)
optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
images = torch.randn(64, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
labels = torch.randint(0, 10, (64,), device="cuda")
first = last = None
for step in range(20):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
    last = loss.item()
    first = first if first is not None else last
assert last < first / 2, (first, last)
reference = nn.Conv2d(8, 16, 3)
found = reference.cuda()(torch.ones(2, 8, 16, 16, device="cuda")).cpu()
assert torch.allclose(found, reference.cpu()(torch.ones(2, 8, 16, 16)), atol=2e-3)
print("conv ok")
