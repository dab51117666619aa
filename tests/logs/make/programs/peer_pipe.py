import multiprocessing
import os
import time


def server(connection):
    connection.recv()
    os._exit(0)


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=server, args=(there,))
    child.start()
    there.close()
    here.send("features 1")
    print("step 1 sent")
    time.sleep(1)
    for step in range(2, 50):
        here.send(bytes(100_000))
