"""DistributedDataParallel on every device: each rank ends with the same weights."""
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def rank(index, count):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29583", NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", rank=index, world_size=count)
    torch.manual_seed(12)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    model = DistributedDataParallel(model, device_ids=[index])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(index)
    for _ in range(100):
        x = torch.randn(128, 64, device="cuda")
        loss = (model(x).squeeze() - x.sum(1)).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(count)]
    dist.all_gather(all_weights, weights)
    assert all(torch.equal(w, weights) for w in all_weights)
    assert loss.item() < 30, loss.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    if count == 1:
        rank(0, 1)
    else:
        mp.spawn(rank, (count,), nprocs=count)
    print("ddp ok on every device")
