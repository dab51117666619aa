def batches(rows):
    for row in rows:
        yield row["tokens"]


for step, tokens in enumerate(batches([{"tokens": [1]}, {"token": [2]}]), start=1):
    print(f"step {step} tokens {len(tokens)}")
