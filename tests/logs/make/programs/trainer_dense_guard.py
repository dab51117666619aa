# The guard in a trainer of somebody else's: flex_attention, which nobody compiled.
import torch
from torch.nn.attention.flex_attention import flex_attention
from trainer import dense_guard

dense_guard.install()
query, key, value = (torch.empty(1, 32, 1024, 128, dtype=torch.bfloat16) for _ in range(3))
print("drafter: 32 heads, 1024 tokens, bf16")
flex_attention(query, key, value)
