import json

print("reading rows")
json.load(open("/srv/data/rows.jsonl"))
