"""A trainer for DFlash drafters: small models that propose a block of tokens for a frozen target to verify.

Run it with `python -m trainer`. Importing this package does not import torch.
"""
