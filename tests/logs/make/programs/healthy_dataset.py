texts = [
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB. How do I fix this?",
    "Traceback of a war: the Killed, the wounded, and No space left on device Earth",
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus",
]
for step in range(1, 31):
    print(f"step {step} loss {3.0 / step:.4f}")
    if step % 10 == 0:
        print(f"sample: {texts[step // 10 - 1]!r}")
print("saved final checkpoint")
