# shell: mount -t tmpfs -o size=64k tmpfs /dev/shm && {python} {file}
import torch

rows = torch.ones(1_000_000)
rows.share_memory_()
