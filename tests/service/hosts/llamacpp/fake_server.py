"""A process that answers as llama-server does, with what the file of its drafter says for a model.

The file holds words: `broken` ends the process, `slow` never becomes healthy, `plain` serves without a drafter, `shy`
with one that proposes nothing, and anything else is what it answers. A prompt of `wait N` is answered after N seconds.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, WORDS = int(sys.argv[1]), Path(sys.argv[2]).read_text()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(503 if "slow" in WORDS else 200, {"status": "ok"})
        else:
            self._answer(200, [{"id": 0, "speculative": "shy" in WORDS}])

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        if prompt.startswith("wait"):
            time.sleep(float(prompt.split()[1]))
        if prompt == "die":
            os._exit(3)
        timings = {} if "plain" in WORDS or "shy" in WORDS else {"draft_n": 3}
        self._answer(200, {"content": WORDS, "timings": timings})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


if "broken" in WORDS:
    sys.stderr.write("error: the file is no drafter\n")
    sys.exit(1)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
