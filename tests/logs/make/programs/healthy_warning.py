import warnings

for step in range(1, 16):
    if step == 3:
        warnings.warn("out of memory was avoided by falling back to a smaller workspace", stacklevel=1)
    print(f"step {step} error rate {0.5 / step:.4f} failed 0 killed 0 loss {1.0 / step:.3f}")
print("Error rate on the test set: 0.03")
