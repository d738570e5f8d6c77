"""CUDA tensors of one process used by another: through IPC handles, and with expandable segments."""
import os
import sys

import torch
import torch.multiprocessing as mp


def child(tasks, results):
    while (tensor := tasks.get()) is not None:
        results.put((str(tensor.device), tensor.double().sum().item()))
        tensor.mul_(2)
        torch.cuda.synchronize()
        del tensor
        results.put("done")


def share():
    context = mp.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(tasks, results))
    process.start()
    for size in (10, 1 << 16, 1 << 24):
        tensor = torch.arange(size, device="cuda", dtype=torch.float32) % 1000
        before = tensor.clone()
        for part in (tensor, tensor[size // 2 :]):
            tasks.put(part)
            assert results.get(timeout=60) == ("cuda:0", part.double().sum().item())
            assert results.get(timeout=60) == "done"
        factor = torch.ones_like(before).mul_(2)
        factor[size // 2 :] *= 2
        assert torch.equal(tensor, before * factor)
    tasks.put(None)
    process.join(30)
    assert process.exitcode == 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        share()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        os.execv(sys.executable, [sys.executable, __file__, "expandable"])
    share()
    print("ipc ok")
