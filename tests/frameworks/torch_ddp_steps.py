"""Trains on every device by DistributedDataParallel over NCCL, deterministic, and prints each step's loss of rank 0 to
the last bit, for restarts to be compared with. Usage: torch_ddp_steps.py STEPS MILLISECONDS"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def rank(index, count, steps, between):
    torch.cuda.set_device(index)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", rank=index, world_size=count)
    torch.manual_seed(12)
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1)).cuda()
    model = DistributedDataParallel(model, device_ids=[index])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    torch.manual_seed(index)
    for step in range(1, steps + 1):
        x = torch.randn(512, 256, device="cuda")
        loss = (model(x).squeeze() - x.sum(1)).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if index == 0:
            print(step, mean.item().hex(), flush=True)
        time.sleep(between / 1000)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.empty_like(weights) for _ in range(count)]
    dist.all_gather(every, weights)
    assert all(torch.equal(w, weights) for w in every)
    if index == 0:
        print("well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29587", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    count, steps, between = torch.cuda.device_count(), int(sys.argv[1]), int(sys.argv[2])
    if count == 1:
        rank(0, 1, steps, between)
    else:
        mp.spawn(rank, (count, steps, between), nprocs=count)
