# shell: {python} -m torch.distributed.run --standalone --nproc-per-node 2 {file}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = {"tokens": 4096}
for step in range(1, 4):
    if dist.get_rank() == 1 and step == 3:
        values["anchors"]
    dist.all_reduce(torch.ones(1))
    print(f"rank {dist.get_rank()} step {step}", flush=True)
