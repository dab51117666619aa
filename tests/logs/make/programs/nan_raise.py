import math

loss = 2.5
for step in range(1, 9):
    loss = loss * 0.9 if step < 7 else math.nan
    print(f"step {step} loss {loss:.4f}")
    if not math.isfinite(loss):
        raise FloatingPointError(f"Loss is nan at step {step}: stopping")
