# shell: mount -t tmpfs -o size=2m tmpfs /mnt && {python} {file}
import torch

for step in range(1, 10):
    print(f"step {step} loss {2 / step:.4f}")
    if step % 3 == 0:
        torch.save({"model": torch.randn(400_000 * step)}, f"/mnt/step-{step}.pt")
