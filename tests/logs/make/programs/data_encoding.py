import pathlib

pathlib.Path("rows.txt").write_bytes(b"caf\xe9 au lait\n")
for line in open("rows.txt", encoding="utf-8"):
    print(line)
