import glob
import os
import subprocess
import sys
import torch

code = (
    "import torch; f = torch.compile(lambda x: (x * 2).relu().sum()); print('step 1 loss', f(torch.randn(64)).item())"
)
subprocess.run([sys.executable, "-c", code], check=True)
for path in glob.glob(os.environ["TORCHINDUCTOR_CACHE_DIR"] + "/**/*.main.so", recursive=True):
    open(path, "wb").close()
raise SystemExit(subprocess.run([sys.executable, "-c", code]).returncode)
