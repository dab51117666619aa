import torch

step = torch.compile(lambda x: x.sin().sum(), dynamic=False, backend="eager")
step(torch.randn(128))
torch.compiler.set_stance("fail_on_recompile")
print("warmed and sealed")
for number, length in enumerate((128, 128, 256), start=1):
    print(f"step {number} loss {step(torch.randn(length)).item():.4f}")
