"""A certificate authority for one cluster and the certificates of its parts, made with the openssl program."""

from __future__ import annotations

import subprocess
from pathlib import Path

DAYS = "2"


class Authority:
    """The cluster's certificate authority; everything lies in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.crt"
        self._key = folder / "ca.key"
        folder.mkdir(parents=True)
        _openssl(
            "req", "-x509", *_new_key(self._key), "-subj", "/CN=fusecache-test", "-days", DAYS, "-out", self.certificate
        )

    def issue(self, name: str, subject: str, alternative_names: str = "") -> tuple[Path, Path]:
        """(certificate, key) for `subject` ("/O=group/CN=user"), for servers with their names ("IP:..,DNS:..")."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        _openssl("req", *_new_key(key), "-subj", subject, "-out", request)
        lines = ["keyUsage=digitalSignature,keyEncipherment", "extendedKeyUsage=clientAuth,serverAuth"]
        if alternative_names:
            lines.append(f"subjectAltName={alternative_names}")
        extensions.write_text("\n".join(lines) + "\n")
        signed_by = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial")
        _openssl("x509", "-req", "-in", request, *signed_by, "-days", DAYS, "-extfile", extensions, "-out", certificate)
        return certificate, key

    def key_pair(self, name: str) -> tuple[Path, Path]:
        """(private, public) RSA key that signs something else than certificates."""
        private, public = self.folder / f"{name}.key", self.folder / f"{name}.pub"
        _openssl("genrsa", "-out", private, "2048")
        _openssl("rsa", "-in", private, "-pubout", "-out", public)
        return private, public


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")
