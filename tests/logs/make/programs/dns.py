# shell: unshare --net {python} {file}
import urllib.request

print("fetching the tokenizer")
urllib.request.urlopen("https://models.example.org/tokenizer.json", timeout=5)
