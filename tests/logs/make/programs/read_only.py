# shell: mount -t tmpfs -o ro tmpfs /mnt && {python} {file}
import pathlib

print("step 100 loss 1.2301")
pathlib.Path("/mnt/checkpoints").mkdir()
