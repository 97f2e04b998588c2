"""The Kubernetes API as plain JSON over TLS: what tests say is what the server gets, with nothing in between.

Paths are the API's own ("/api/v1/nodes"); `pods(namespace)` and the like make the usual ones.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Object = dict[str, Any]

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
NODES = "/api/v1/nodes"
TIMEOUT_S = 30.0


class Refused(Exception):
    """The API server's answer was an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status
        self.message = message


class Api:
    """Requests as the user of one client certificate, or of one bearer token."""

    def __init__(
        self, server: str, authority: Path, identity: tuple[Path, Path] | None = None, token: str | None = None
    ) -> None:
        self._server = server
        self._context = ssl.create_default_context(cafile=str(authority))
        if identity is not None:
            self._context.load_cert_chain(*identity)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> Any:
        """One object, or a list of them."""
        return self._send("GET", path)

    def create(self, path: str, body: Object) -> Any:
        """POST; the object as it was stored."""
        return self._send("POST", path, body)

    def patch(self, path: str, body: Any, kind: str = MERGE_PATCH) -> Any:
        """PATCH; the object as it was stored."""
        return self._send("PATCH", path, body, kind)

    def delete(self, path: str, *, grace_period_s: int | None = None) -> None:
        """DELETE; it is no error when it is gone already."""
        body = None if grace_period_s is None else {"gracePeriodSeconds": grace_period_s}
        try:
            self._send("DELETE", path, body)
        except Refused as refusal:
            if refusal.status != 404:
                raise

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self.get(path)
        except Refused as refusal:
            if refusal.status != 404:
                raise
            return False
        return True

    def text(self, path: str) -> str:
        """An answer that is no JSON: a pod's log."""
        return self._raw("GET", path, None, None).decode(errors="replace")

    def _send(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        return json.loads(self._raw(method, path, body, kind))

    def _raw(self, method: str, path: str, body: Any, kind: str | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": kind} if data is not None and kind else {})
        request = urllib.request.Request(self._server + path, method=method, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, context=self._context, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as failure:
            with failure:
                text = failure.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError):
                text = json.loads(text)["message"]
            raise Refused(failure.code, text) from None


def pods(namespace: str, name: str = "") -> str:
    """The path of a namespace's pods, or of one."""
    return f"/api/v1/namespaces/{namespace}/pods" + (f"/{name}" if name else "")
