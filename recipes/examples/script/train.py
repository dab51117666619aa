"""A training script as anybody writes one. All that it knows of orch are two variables, and it runs without them."""

import json
import os
import time
from pathlib import Path

import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
out = Path(os.environ.get("ORCH_RUN_DIR", "."))  # what is written goes here, never beside the code
metrics = Path(os.environ.get("ORCH_METRICS", out / "metrics.jsonl"))

for step in range(1, 41):
    inputs = torch.randn(64, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with metrics.open("a") as file:
        print(json.dumps({"step": step, "loss": loss.item(), "tokens": 64, "time": time.time()}), file=file)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

torch.save(model.state_dict(), out / "model.pt")
