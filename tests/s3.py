"""A server of the S3 protocol on loopback: moto's, with its state in memory. It checks no signature."""

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from tests.patience import until
from tests.tiny_run import free_port


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
    names = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    try:
        until(lambda: _answers(address), 60)
        bucket = f"bucket-{uuid.uuid4().hex}"
        with mock.patch.dict("os.environ", names | {"AWS_DEFAULT_REGION": "us-east-1"}):
            import s3fs

            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        server.kill()
        server.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=5).close()
    except OSError:
        return False
    return True
