import torch

torch.nn.Linear(4, 4).to("cuda")
