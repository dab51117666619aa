import traceback

print("step 100 loss 0.5")
try:
    open("/srv/run/optional.json")
except FileNotFoundError:
    traceback.print_exc()
    print("no optional.json: ignoring it")
print("training finished in 12 s")
