# shell: ulimit -v 400000; {python} {file}
rows = []
while True:
    rows.append(bytearray(50_000_000))
    print(f"loaded shard {len(rows)}")
