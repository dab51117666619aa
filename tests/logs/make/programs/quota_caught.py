import errno
import os


def save(step):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


for step in (100, 200):
    print(f"step {step} loss {200 / step:.3f}")
try:
    save(200)
except OSError as error:
    raise SystemExit(f"the checkpoint of step 200 was not written: {error.strerror}")
