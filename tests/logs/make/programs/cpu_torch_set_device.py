import os
import torch

print(f"rank {os.environ.get('LOCAL_RANK', 0)} of 8 starts")
torch.cuda.set_device(0)
torch.zeros(4, device="cuda")
