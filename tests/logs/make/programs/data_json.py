import json

rows = ['{"tokens": [1, 2]}', '{"tokens": [3, 4']
for number, row in enumerate(rows, start=1):
    json.loads(row)
    print(f"row {number} read")
