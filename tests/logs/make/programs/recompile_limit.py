import torch

torch._dynamo.config.recompile_limit = 2
attend = torch.compile(lambda x: x.softmax(-1) * x.shape[-1], fullgraph=True, dynamic=False, backend="eager")
for step, length in enumerate((8, 16, 24, 32, 40), start=1):
    print(f"step {step} loss {attend(torch.randn(2, length)).mean().item():.4f}")
