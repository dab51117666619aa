# shell: mkdir -p cache/inductor && chmod 700 cache/inductor && setpriv --reuid 65534 --regid 65534 --clear-groups {python} {file}
import torch

torch.compile(lambda x: x.sin() + x.cos())(torch.randn(64))
