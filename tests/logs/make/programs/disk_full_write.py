# shell: mount -t tmpfs -o size=1m tmpfs /mnt && {python} {file}
with open("/mnt/features.bin", "wb", buffering=0) as file:
    for step in range(1, 100):
        if file.write(bytes(100_000)) < 100_000:
            file.write(bytes(100_000))
