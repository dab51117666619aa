import traceback

for step in range(1, 41):
    try:
        if step == 12:
            {}["optional"]
    except KeyError:
        print("could not log the optional figure:")
        traceback.print_exc()
    print(f"step {step} loss {3.0 / step:.4f} tok/s 19876")
