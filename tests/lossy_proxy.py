"""A proxy in front of a Valkey that can lose replies: the server does what it was asked, and nobody hears of it."""

import socket
import threading
from contextlib import suppress
from pathlib import Path

BUFFER = 65_536


class LossyProxy:
    """Forwards a unix socket to another. While `losing`, replies are dropped and requests still arrive."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.losing = False
        self.url = f"unix://{path}?db=0"
        self._upstream = str(upstream)
        self._sockets: list[socket.socket] = []
        self._listener = self._made(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):  # its other end was faster
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _made(self, one: socket.socket) -> socket.socket:
        self._sockets.append(one)
        return one

    def _accept(self) -> None:
        while True:
            try:
                client = self._made(self._listener.accept()[0])
            except OSError:
                return  # closed
            server = self._made(socket.socket(socket.AF_UNIX))
            server.connect(self._upstream)
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        try:
            while data := source.recv(BUFFER):
                if not (replies and self.losing):
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # closed
