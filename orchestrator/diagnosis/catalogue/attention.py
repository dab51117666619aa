"""Dense attention where a fused kernel was meant, and what else asks for scores or masks of full size."""

from __future__ import annotations

from orchestrator.diagnosis.catalogue.words import line, raised, said
from orchestrator.diagnosis.model import Cause

OOM = "OutOfMemoryError|AcceleratorError|RuntimeError"
OOM_TEXT = "CUDA out of memory"
DENSE_FRAMES = r"in (?:_math_attention_inner|math_attention|sdpa_dense|sdpa_dense_backward)\b"
_MASK_FRAMES = (
    r"in (?:create_block_mask|create_mask|_convert_mask_to_block_mask|_create_sparse_block_from_block_mask)\b"
)

CAUSES = (
    Cause(
        "dense-attention-oom",
        "attention ran dense, and its score matrix did not fit",
        "attention",
        (
            raised(OOM, OOM_TEXT, frames=DENSE_FRAMES),
            raised(OOM, OOM_TEXT, when="dense_bytes"),
        ),
        (
            "flex_attention was not compiled here: it built the whole score matrix. A smaller batch only moves the "
            "limit; the cause is the missing compilation.",
            "Call torch.compile(flex_attention, fullgraph=True) and nothing else. Look for what switched it off: a "
            "plain call, TORCH_COMPILE_DISABLE, the eager back end, a disabled helper, suppress_errors, the "
            "recompile limit, error_on_nested_fx_trace=False.",
        ),
        precedence=90,
    ),
    Cause(
        "dense-attention-running",
        "attention runs dense: it is slow, and takes memory with the square of the length",
        "attention",
        (
            line(
                "flex_attention called without torch.compile()",
                r"UserWarning: flex_attention called without torch\.compile\(\)",
                role="warning",
            ),
            line(
                ("hit config.recompile_limit", "hit config.cache_size_limit"),
                r"torch\._dynamo hit config\.(?:recompile_limit|cache_size_limit)",
                role="warning",
                after=r"function: '[^']*(?:flex_attention|attention|attend)[^']*'",
            ),
        ),
        (
            "Stop it unless the shape is a toy: with a longer row it will run out of memory, and it holds other "
            "workers up by tracing on every call.",
            "Call torch.compile(flex_attention, fullgraph=True); where the recompile limit was reached, pad or "
            "bucket the lengths.",
        ),
        "orch stop {run}",
        structured=("dense_by_figures",),
        precedence=70,
    ),
    Cause(
        "mask-oom",
        "building the block mask took the memory of a full mask",
        "attention",
        (raised(OOM, OOM_TEXT, frames=_MASK_FRAMES),),
        (
            "create_block_mask evaluates the mask for every pair of positions. Compile it "
            "(torch.compile(create_block_mask)), pass H=None where heads share it, or build it from intervals.",
        ),
        precedence=88,
    ),
    Cause(
        "dense-attention-refused",
        "the trainer refused dense attention before it took the memory",
        "attention",
        (
            said("flex attention was about to build its scores", "dense attention would build scores of"),
            raised("DenseAttentionError"),
        ),
        (
            "If it names flex attention: that was not compiled. Look for what switched compiling off at the callers "
            "that it names: a plain call of flex_attention, TORCH_COMPILE_DISABLE, a disabled helper, the recompile "
            "limit, a thread that is tracing. Without the guard the run would die of memory.",
            "If it names dense attention: the shape is too large to build scores for. Set `attention: flex` on a GPU, "
            "or make rows, blocks or the batch smaller.",
        ),
        precedence=92,
    ),
    Cause(
        "target-unsupported",
        "this model cannot be a target: its attention is not what the trainer can control",
        "attention",
        (
            said(
                "lets packed documents see each other",
                "which is not supported; use another target",
                "does not use the attention it was given",
                "to take features from",
            ),
        ),
        (
            "Linear attention, convolutions, soft-capped logits, sinks and position biases are not supported: a "
            "drafter would learn from wrong features. Use a target of plain softmax attention, such as Qwen3 or Llama.",
        ),
        precedence=74,
    ),
)
