# shell: ulimit -n 64; {python} {file}
shards = [open(f"/srv/run/shard-{number}", "w") if False else open("/dev/null") for number in range(100)]
