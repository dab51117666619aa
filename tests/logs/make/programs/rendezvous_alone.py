import datetime
import torch.distributed as dist

dist.TCPStore(
    "127.0.0.1", 0, world_size=2, is_master=True, timeout=datetime.timedelta(seconds=2), wait_for_workers=True
)
