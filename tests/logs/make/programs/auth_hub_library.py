# torch's environment brings the library
import http.server
import os
import threading


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *words):
        pass


hub = http.server.HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
from huggingface_hub import hf_hub_download  # noqa: E402

hf_hub_download("org/gated-model", "config.json")
