# shell: bash -c '({python} {file}; exit $?) & sleep 2; kill -TERM $(pgrep -P $! | head -1); wait $!; echo status $?'
import time

for step in range(1, 1000):
    print(f"step {step} loss {3 / step:.4f}")
    time.sleep(0.3)
