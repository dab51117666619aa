import sys
import time

for step in range(1, 200):
    sys.stderr.write(f"\r{step}/200 [00:{step // 10:02d}<00:10, 19.9it/s, loss={2 / step:.3f}, failed=0, oom=0]")
print("\nWARNING: 3 rows were skipped: json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
print("done")
