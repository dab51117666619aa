import os
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 20:
            os._exit(0)
        return torch.full((4,), index)


for step, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1), start=1):
    print(f"step {step} loss {batch.float().mean().item():.2f}")
