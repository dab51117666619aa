# shell: ulimit -n 48; {python} {file}
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.full((16,), index)


kept = []
for batch in torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=1):
    kept.append(batch)
