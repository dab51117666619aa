import http.server
import threading
import urllib.request


class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(401)

    def log_message(self, *words):
        pass


hub = http.server.HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=hub.serve_forever, daemon=True).start()
print("downloading the target model")


class HTTPError(Exception):
    pass


try:
    urllib.request.urlopen(f"http://127.0.0.1:{hub.server_port}/api/models/target")
except urllib.error.HTTPError as error:
    raise HTTPError(
        f"{error.code} Client Error: {error.reason} for url: https://hub.example.org/api/models/target"
    ) from None
