"""A web server that is posted to."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextlib.contextmanager
def web_server():
    """It answers with ``codes`` in turn, then with 200, and keeps what it got, and how."""

    class Page(BaseHTTPRequestHandler):
        def do_POST(self):
            made.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            made.asked.append((self.path, self.headers["Authorization"]))
            self.send_response(made.codes.pop(0) if made.codes else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Page)
    made.got, made.asked, made.codes = [], [], []
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()
