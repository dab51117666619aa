# shell: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {file}
import datetime
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
if dist.get_rank() == 1:
    time.sleep(20)
dist.all_reduce(torch.ones(1))
