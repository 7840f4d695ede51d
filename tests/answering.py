"""What the small HTTP servers of tests have in common."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """Reads and answers JSON or bytes whole, and logs nothing."""

    def body(self) -> Any:
        """What was sent; None where nothing was."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")

    def answer(self, status: int, said: object) -> None:
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...
