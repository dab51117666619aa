# shell: bash -c '{python} {file}; echo exit $?'
import os

print("loading", flush=True)
os.abort()
