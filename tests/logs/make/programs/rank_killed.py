# shell: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {file}
import os
import signal
import time
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} ready", flush=True)
if dist.get_rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30)
