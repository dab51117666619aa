import errno
import os


def save(path):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)


print("saving checkpoint at step 400")
save("/srv/run/checkpoints/step-400.pt.tmp")
