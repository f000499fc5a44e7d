"""A server of the S3 protocol on loopback: moto's, with its state in memory. It checks no signature.

Wrong answers come from a proxy in front of it.
"""

import http.client
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest

from tests.patience import until
from tests.tiny_run import free_port


class Faults(BaseHTTPRequestHandler):
    """Forwards a request to the server; while a fault is set, objects of checkpoints are answered wrongly."""

    protocol_version = "HTTP/1.1"
    fault = ""
    """a status, "slow": after half a second, or "cut": with half of the body"""
    server_port = 0

    def answer(self) -> None:
        fault = Faults.fault if "/step-" in self.path else ""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault.isdecimal():
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "slow":
            time.sleep(0.5)
        server = http.client.HTTPConnection("127.0.0.1", Faults.server_port, timeout=60)
        server.request(self.command, self.path, body, dict(self.headers))
        response = server.getresponse()
        content = response.read()
        self.send_response(response.status)
        for name, value in response.headers.items():
            if name.lower() not in ("connection", "date", "server", "transfer-encoding"):
                self.send_header(name, value)
        if not response.headers.get("Content-Length"):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "cut":
            self.close_connection = True
            content = content[: len(content) // 2]
        self.wfile.write(content)
        server.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Yield the URL of a new bucket; the environment names the server to s3fs, also in processes of this one."""
    pytest.importorskip("s3fs", reason="the package s3fs is missing")
    pytest.importorskip("moto.server", reason="the package moto[server] is missing")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    Faults.fault, Faults.server_port = "", port
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Faults)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    names = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}"}
    names |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    try:
        until(lambda: _answers(address), 60)
        bucket = f"bucket-{uuid.uuid4().hex}"
        with mock.patch.dict("os.environ", names | {"AWS_DEFAULT_REGION": "us-east-1"}):
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.kill()
        server.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=5).close()
    except OSError:
        return False
    return True
