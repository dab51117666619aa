# shell: printf '#!/bin/sh\ncase "$*" in *main.cpp*) echo "main.cpp:3:10: error: expected unqualified-id before numeric constant" >&2; exit 1;; esac\nexec g++ "$@"\n' >cxx && chmod +x cxx && env CXX={dir}/cxx {python} {file}
import torch

print("compiling for this machine")
torch.compile(lambda x: x.sin() + x.cos())(torch.randn(64))
