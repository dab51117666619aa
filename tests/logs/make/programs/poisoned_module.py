import threading
import torch

net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
other = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(8)])
done = threading.Event()


def trace():
    while not done.is_set():
        torch.fx.symbolic_trace(other)


threading.Thread(target=trace, daemon=True).start()
try:
    for step in range(200000):
        net(torch.randn(4, 16))
finally:
    done.set()
