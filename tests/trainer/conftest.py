"""The trainer's tests need its dependencies; without torch only those of the configuration run."""

import importlib.util
import os

collect_ignore = []
if importlib.util.find_spec("torch") is None:
    collect_ignore = ["test_block_mask.py", "test_data.py", "test_drafter.py", "test_optimizer.py", "test_run.py"]

# as the command line does: threads that spin long stop each other on a busy machine; read when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
