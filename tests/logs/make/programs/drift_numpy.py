# shell: mkdir torchvision && printf 'import torch\ntorch.ops.torchvision.nms\n' >torchvision/__init__.py && {python} {file}
import torchvision
