loss = 2.31
for step in range(4100, 4160, 10):
    print(f"[12:01:{step % 60:02d}] step: {step} loss: {loss:.2f}")
    loss *= 4
    if loss > 500:
        raise SystemExit("loss diverged (more than 3 x its mean), stopping")
