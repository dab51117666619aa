import datetime
import torch.distributed as dist

print("rank 1 joins")
dist.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29399", rank=1, world_size=2, timeout=datetime.timedelta(seconds=3)
)
