import torch

weight = torch.zeros(4, requires_grad=True)
with torch.autograd.detect_anomaly():
    for step in range(1, 3):
        loss = (weight.sqrt() * 0).sum()
        print(f"step {step} loss {loss.item():.4f}")
        loss.backward()
