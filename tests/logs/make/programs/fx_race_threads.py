import threading
import torch
from torch.fx.experimental.proxy_tensor import make_fx

step = torch.compile(lambda x: x.cos() * 2, backend="eager")
step(torch.randn(8))
done = threading.Event()


def export():
    while not done.is_set():
        make_fx(lambda x: torch.sin(x) * 2)(torch.randn(8))


threading.Thread(target=export, daemon=True).start()
try:
    for number in range(1, 1000000):
        step(torch.randn(8))
finally:
    done.set()
