import socket
import torch.distributed as dist

held = socket.create_server(("127.0.0.1", 0))
port = held.getsockname()[1]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
