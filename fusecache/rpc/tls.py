"""TLS material of a connection: read when a channel is made, named in the error when it can't be.

Does not watch the files: a new certificate is used by the next channel, the live ones keep theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import grpc

from fusecache.errors import UsageError


class TlsFiles(NamedTuple):
    """Which PEM files to use; None = the system's roots, or no certificate of our own."""

    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None


def load_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Read the files; UsageError names the one that can't be read, or the missing half of a pair."""
    if (files.cert_file is None) != (files.key_file is None):
        raise UsageError(
            f"TLS needs certificate and key together: tls_cert_file={files.cert_file}, tls_key_file={files.key_file}"
        )
    return grpc.ssl_channel_credentials(
        root_certificates=_read("tls_ca_file", files.ca_file),
        private_key=_read("tls_key_file", files.key_file),
        certificate_chain=_read("tls_cert_file", files.cert_file),
    )


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{setting}: can't read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise UsageError(f"{setting}: {path} is not a PEM file (no '-----BEGIN')")
    return content
