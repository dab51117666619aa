loss = 2.5
for step in range(1, 12):
    loss *= 3
    print(f"step {step} loss {loss:.4f}")
print("training diverged: loss above 1e4, giving up")
raise SystemExit(3)
