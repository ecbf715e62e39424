"""A proxy in front of the API server that answers some requests wrongly, slowly or by halves.

Clients speak plain HTTP to it. Without a fault it only passes on.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.kubernetes.control_plane import ControlPlane

PASSED_ON = ("Authorization", "Content-Type", "Accept")


@dataclass
class Fault:
    """What happens to requests with these words in "METHOD /path?query"."""

    words: tuple[str, ...]
    times: int = 1
    """How many requests it hits."""
    code: int = 0
    """Answer with this status; 0: pass the request on."""
    retry_after_s: int = 0
    delay_s: float = 0.0
    cut_after: int = 0
    """Close the connection after so many bytes of the answer, if that is not 0."""
    hit: threading.Event = field(default_factory=threading.Event)
    """It has hit a request for the last time."""
    at: list[float] = field(default_factory=list)
    """When it has hit one."""


class FaultyProxy:
    def __init__(self, plane: ControlPlane, port: int) -> None:
        self.plane, self.url = plane, f"http://127.0.0.1:{port}"
        self.requests: list[tuple[float, str]] = []
        """When each request arrived, and its first line."""
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, *words: str, **about: float) -> Fault:
        fault = Fault(words, **about)  # type: ignore[arg-type]
        with self._lock:
            self._faults.append(fault)
        return fault

    def fault_of(self, line: str) -> Fault | None:
        now = time.monotonic()
        with self._lock:
            self.requests.append((now, line))
            for fault in self._faults:
                if all(word in line for word in fault.words):
                    fault.times -= 1
                    fault.at.append(now)
                    if fault.times == 0:
                        self._faults.remove(fault)
                        fault.hit.set()
                    return fault
        return None


@contextmanager
def faulty_proxy(plane: ControlPlane) -> Iterator[FaultyProxy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.proxy = FaultyProxy(plane, server.server_address[1])  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.proxy  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        proxy: FaultyProxy = self.server.proxy  # type: ignore[attr-defined]
        fault = proxy.fault_of(f"{self.command} {self.path}") or Fault(())
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        threading.Event().wait(fault.delay_s)
        with suppress(OSError, http.client.HTTPException):
            if fault.code:
                self._refuse(fault)
            else:
                self._pass_on(proxy.plane, body, fault.cut_after)
            return
        self.close_connection = True

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _refuse(self, fault: Fault) -> None:
        status = {"kind": "Status", "code": fault.code, "message": f"injected {fault.code}"}
        text = json.dumps(status).encode()
        self.send_response(fault.code)
        if fault.retry_after_s:
            self.send_header("Retry-After", str(fault.retry_after_s))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _pass_on(self, plane: ControlPlane, body: bytes, cut_after: int) -> None:
        context = ssl.create_default_context(cafile=str(plane.ca))
        address = urlsplit(plane.url).netloc
        upstream = http.client.HTTPSConnection(address, context=context, timeout=120)
        headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        try:
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            sent = 0
            while block := answer.read1(65536):
                if cut_after and sent + len(block) > cut_after:
                    self._chunk(block[: cut_after - sent])
                    raise OSError("cut")
                self._chunk(block)
                sent += len(block)
            self.wfile.write(b"0\r\n\r\n")
        finally:
            upstream.close()

    def _chunk(self, block: bytes) -> None:
        self.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass
