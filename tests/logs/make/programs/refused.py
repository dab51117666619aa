import socket

print("step 0: sending metrics")
socket.create_connection(("127.0.0.1", 9), timeout=3)
