"""Certificates for measurements and tests, made with the `openssl` command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from messaging.files import TlsFiles

_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


class Authority:
    """A certificate authority. Its certificate is `ca`; `issue` makes others."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._key, self.ca = folder / "ca.key", folder / "ca.pem"
        _openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca, "-subj", "/CN=authority")

    def issue(self, name: str, *options: str) -> TlsFiles:
        """Issue a worker's key and certificate. `options` are passed to `openssl x509`."""
        key, request, cert = (self._folder / f"{name}.{suffix}" for suffix in ("key", "csr", "pem"))
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signing: list[str | Path] = ["-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"]
        _openssl("x509", "-req", "-in", request, *signing, "-out", cert, *(options or ("-days", "2")))
        return TlsFiles(cert=str(cert), key=str(key), ca=str(self.ca))


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
