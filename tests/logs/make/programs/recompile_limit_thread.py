import threading
import torch

torch._dynamo.config.recompile_limit = 64
half = torch.compile(lambda x: x * 0.5 + x.shape[0], fullgraph=True, dynamic=False, backend="eager")


def worker():
    for length in range(4, 40):
        half(torch.ones(length))


thread = threading.Thread(target=worker, name="drafter-0")
thread.start()
thread.join()
raise SystemExit(1)
