# shell: env TORCH_DISTRIBUTED_DEBUG=DETAIL {python} -m torch.distributed.run --standalone --nproc-per-node 2 {file}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("step 1", flush=True)
dist.all_reduce(torch.ones(4 + dist.get_rank()))
