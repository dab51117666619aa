# shell: printf 'def train():\n    step = 1\n      loss = 2\n' >model.py && {python} model.py
