import torch

torch.load("/srv/models/target/consolidated.pt")
