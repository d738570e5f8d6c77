"""A DataLoader with worker processes and pinned batches."""
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    data = TensorDataset(torch.arange(4096).float().view(-1, 1).expand(-1, 256).contiguous())
    loader = DataLoader(data, batch_size=64, num_workers=2, pin_memory=True)
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    for (batch,) in loader:
        total += batch.cuda(non_blocking=True).double().sum()
    assert total.item() == 256 * 4095 * 4096 / 2, total.item()
    print("loader ok")
