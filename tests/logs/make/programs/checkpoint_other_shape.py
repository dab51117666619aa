import torch

torch.save(torch.nn.Linear(64, 64).state_dict(), "step-200.pt")
torch.nn.Linear(128, 64).load_state_dict(torch.load("step-200.pt"))
