import ctypes

print("step 1 loss 2.3", flush=True)
ctypes.string_at(0)
