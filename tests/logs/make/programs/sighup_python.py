import os
import signal
import sys


def left(number, frame):
    print("received SIGHUP, ending")
    sys.exit(129)


signal.signal(signal.SIGHUP, left)
print("step 3 loss 2.2")
os.kill(os.getpid(), signal.SIGHUP)
