# shell: mount -t tmpfs -o size=1m tmpfs /dev/shm && {python} {file}
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((500_000,), index)


for step, batch in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2), start=1):
    print(f"step {step} loss {batch.float().mean().item():.2f}")
