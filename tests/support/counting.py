"""Stands before an S3 server and counts the bytes that clients send: bodies of requests, by path."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Counter:
    """A front of a server, until `stop`.

    Args:
        upstream: The server's address.

    Attributes:
        endpoint: Its own.
        bodies: Path and bytes of each request that was answered well.
        copies: Paths of objects that were copied inside.
    """

    def __init__(self, upstream: str) -> None:
        self.bodies: list[tuple[str, int]] = []
        self.copies: list[str] = []
        handler = type("Handler", (_Handler,), {"counter": self, "upstream": urlsplit(upstream).netloc})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def sent(self, below: str) -> int:
        """Returns the bytes sent to paths that contain a part."""
        return sum(size for path, size in self.bodies if below in path)

    def stop(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counter: Counter
    upstream: str

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            # With the client's own `Host`, which it has signed.
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(data)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status < 300:
            path = unquote(urlsplit(self.path).path)
            self.counter.bodies.append((path, len(data)))
            if "x-amz-copy-source" in self.headers:
                self.counter.copies.append(path)
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            own = ("transfer-encoding", "connection", "date", "server")
            if name.lower() not in own + (() if self.command == "HEAD" else ("content-length",)):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing of each request."""
