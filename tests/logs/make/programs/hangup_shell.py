# shell: bash -c '{python} {file}; exit $?'
import os
import signal

print("step 10 loss 1.9", flush=True)
os.kill(os.getpid(), signal.SIGHUP)
