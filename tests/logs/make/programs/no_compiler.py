# shell: env CXX=/nowhere/g++ {python} {file}
import torch

print("compiling")
torch.compile(lambda x: x.sin() + x.cos())(torch.randn(64))
