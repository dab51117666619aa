"""The same model on every rank, started by torchrun; rank 0 tells how it goes."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, device = dist.get_rank(), torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)  # each rank has data of its own

for step in range(1, 21):
    inputs = torch.randn(64, 8, device=device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        tokens = 64 * dist.get_world_size()
        line = {"step": step, "loss": loss.item(), "tokens": tokens, "time": time.time()}
        with Path(os.environ.get("ORCH_METRICS", "metrics.jsonl")).open("a") as metrics:
            print(json.dumps(line), file=metrics)

print(f"rank {rank} of {dist.get_world_size()}: done", flush=True)
dist.destroy_process_group()
