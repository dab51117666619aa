import torch

small, large = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
state = torch.optim.AdamW(small.parameters()).state_dict()
print("resuming the optimizer")
torch.optim.AdamW(large.parameters()).load_state_dict(state)
