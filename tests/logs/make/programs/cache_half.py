import glob
import os
import subprocess
import sys
import torch

code = "import torch; print(torch.compile(lambda x: x.sin() * x.cos() - 1)(torch.randn(64)).sum().item())"
subprocess.run([sys.executable, "-c", code], check=True)
for path in glob.glob(os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/**/*.main.so", recursive=True):
    open(path, "wb").write(bytes(5000))
raise SystemExit(subprocess.run([sys.executable, "-c", code]).returncode)
