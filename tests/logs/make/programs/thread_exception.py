import threading


def prefetch():
    raise ValueError("row 17 has no labels")


thread = threading.Thread(target=prefetch, name="prefetch")
thread.start()
thread.join()
raise SystemExit(1)
