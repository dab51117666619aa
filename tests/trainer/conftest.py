"""The trainer's tests need its dependencies; without torch only those of the configuration run."""

import importlib.util
import os

collect_ignore = []
if importlib.util.find_spec("torch") is None:
    collect_ignore = ["test_block_mask.py", "test_data.py", "test_drafter.py", "test_optimizer.py", "test_run.py"]

# threads that spin while they wait stop each other on a busy machine; read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
