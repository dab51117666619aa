import time

for step in range(1, 21):
    print(f"step {step} loss {2.0 / step:.4f}")
    if step == 7:
        print("ConnectionResetError: [Errno 104] Connection reset by peer")
        print("WARNING: upload of metrics failed, retrying in 1 s")
        print("metrics uploaded at the second attempt")
print("training finished")
