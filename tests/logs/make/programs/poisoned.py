import threading
import torch
from torch.fx.experimental.proxy_tensor import make_fx

failed = threading.Event()


def trace():
    for _ in range(4000):
        if failed.is_set():
            return
        try:
            make_fx(lambda x: torch.sin(x) + 1)(torch.randn(8))
        except BaseException:
            failed.set()
            raise


threads = [threading.Thread(target=trace, name=f"exporter-{i}") for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
raise SystemExit(int(failed.is_set()))
