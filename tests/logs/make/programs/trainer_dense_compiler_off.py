# shell: TORCH_COMPILE_DISABLE=1 {python} {file}
# Flex attention of the bundled trainer while the compiler is switched off for the whole process.
import sys

import torch
from trainer import attention, block_mask
from trainer.errors import TrainerError

start = torch.zeros(1, 256, dtype=torch.int64)
query = torch.randn(1, 4, 256, 32)
try:
    attention.document_attention(query, query, query, block_mask.document_mask(start))
except TrainerError as error:  # as the trainer's command does
    sys.exit(f"error: {error}")
