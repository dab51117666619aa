import torch

net = torch.nn.Linear(16, 16)
step = torch.compile(net, backend="eager")
step(torch.randn(4, 16))
torch.compiler.set_stance("fail_on_recompile")
with torch.no_grad():
    step(torch.randn(4, 16))
