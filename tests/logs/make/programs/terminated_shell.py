# shell: bash -c '{python} {file}; exit $?'
import os
import signal

print("step 40 loss 1.4", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
