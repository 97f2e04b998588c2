"""The Kubernetes API, as far as the controller uses it: raw JSON in and out. The only importer of its client.

The client (kubernetes.aio) brings what is hard to get right: kubeconfig and service accounts, TLS, service-account
tokens that are read again as they are renewed (those that a kubeconfig's `exec` made are not). Its typed objects are
not used: a pod would take 26 KiB, and fields of a newer API would be lost on the way back. Every call has a deadline,
and every failure is one of ours (`fusecache.errors.CoSchedulingError`).

A failed `test` of a JSON patch is 422 with a bare text, as an invalid change is: both are PatchConflict, and who
patches reads the object again to tell them apart.

Nothing here decides, retries or remembers; texts of the server are cut, tokens are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from fusecache.errors import (
    ApiRefused,
    ApiUnavailable,
    CoSchedulingError,
    ObjectMissing,
    PatchConflict,
    UsageError,
    WatchExpired,
)
from fusecache.logs import cut
from fusecache.metrics import Metrics

CALL_S = 10.0
"""Deadline of one call; reading one page of a list too."""

WATCH_S = 60
"""The server ends a watch after this time and we resume it: a connection that died unnoticed is found that soon."""

WATCH_SLACK_S = 15.0
PAGE = 500
"""Objects of one page of a list, as kubectl."""

MAX_EVENT_BYTES = 16 << 20
"""Largest object of a watch; etcd's limit is 1.5 MiB."""

PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"

_JSON_PATCH = "application/json-patch+json"
_MERGE_PATCH = "application/merge-patch+json"


class Listing(NamedTuple):
    """All objects of a kind, and where a watch goes on from."""

    items: list[dict[str, Any]]
    resource_version: str


class WatchEvent(NamedTuple):
    """One line of a watch."""

    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    item: dict[str, Any]


class KubeApi:
    """A connection to one API server; an asynchronous context manager. Made by `connect`."""

    def __init__(self, client: ApiClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics

    @classmethod
    async def connect(cls, kubeconfig: Path | None, metrics: Metrics) -> KubeApi:
        """Read credentials; no call yet. UsageError when there are none."""
        configuration = Configuration()
        if kubeconfig is not None:
            _check_readable(kubeconfig)
        try:
            if kubeconfig is not None:
                await load_kube_config(
                    config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
                )
            else:
                load_incluster_config(client_configuration=configuration)
        except Exception as failure:  # noqa: BLE001 - the client raises whatever its reading of a broken file runs into
            where = f"kubeconfig {str(kubeconfig)!r}" if kubeconfig else "not in a pod (no service account)"
            hint = "" if kubeconfig else "; give --kubeconfig FILE"
            raise UsageError(f"{where}: {_why(failure)}{hint}") from None
        return cls(ApiClient(configuration), metrics)

    @property
    def server(self) -> str:
        """The API server's address."""
        return str(self._client.configuration.host)

    async def __aenter__(self) -> KubeApi:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    # ---- objects ----

    async def list_objects(self, path: str) -> Listing:
        """All objects of a kind, page by page. WatchExpired when a page took too long: begin again."""
        items: list[dict[str, Any]] = []
        query: dict[str, str | int] = {"limit": PAGE}
        while True:
            page = await self._call("GET", path, query=query)
            items += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(items, metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]

    async def watch(self, path: str, resource_version: str) -> AsyncIterator[WatchEvent]:
        """Changes after a resource version, until the server ends the watch. WatchExpired: list again."""
        query: dict[str, str | int] = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
            "resourceVersion": resource_version,
        }
        try:
            response = await self._send("GET", path, query, None, "", WATCH_S + WATCH_SLACK_S)
            try:
                await self._check(response, "WATCH", path)
                async for line in _lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise _error(int(status.get("code") or 500), str(status.get("message")), "WATCH", path)
                    yield WatchEvent(event["type"], event["object"])
            finally:
                response.close()
        except TimeoutError:
            raise ApiUnavailable(f"WATCH {path}: the server should have ended it by now") from None
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as failure:
            raise ApiUnavailable(f"WATCH {path}: {_why(failure)}") from failure

    async def read_pod(self, namespace: str, name: str) -> dict[str, Any]:
        """One pod. ObjectMissing when there is none."""
        return await self._call("GET", _pod_path(namespace, name))

    async def patch_pod(self, namespace: str, name: str, patch: list[dict[str, Any]]) -> dict[str, Any]:
        """A JSON patch; the pod as it is then. PatchConflict: a test failed, or the change is invalid."""
        return await self._call("PATCH", _pod_path(namespace, name), body=patch, content_type=_JSON_PATCH)

    async def patch_pod_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """A merge patch of the status; the pod as it is then. PatchConflict: its resource version is another."""
        path = _pod_path(namespace, name) + "/status"
        return await self._call("PATCH", path, body=patch, content_type=_MERGE_PATCH)

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Write an Event."""
        await self._call("POST", f"/api/v1/namespaces/{quote(namespace)}/events", body=event)

    async def read_lease(self, namespace: str, name: str) -> dict[str, Any]:
        """The Lease. ObjectMissing when there is none."""
        return await self._call("GET", _lease_path(namespace, name))

    async def create_lease(self, namespace: str, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Make the Lease. PatchConflict when somebody was faster."""
        return await self._call("POST", _lease_path(namespace), body=lease)

    async def replace_lease(self, namespace: str, name: str, lease: Mapping[str, Any]) -> dict[str, Any]:
        """Write the whole Lease with the resource version it was read with. PatchConflict when it changed."""
        return await self._call("PUT", _lease_path(namespace, name), body=lease)

    # ---- calls ----

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(CALL_S):
                response = await self._send(method, path, query or {}, body, content_type, CALL_S)
                try:
                    await self._check(response, method, path)
                    answer = json.loads(await response.read())
                finally:
                    response.release()
        except TimeoutError:
            self._count(method, "timeout")
            raise ApiUnavailable(f"{method} {path}: no answer within {CALL_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            self._count(method, "failed")
            raise ApiUnavailable(f"{method} {path}: {_why(failure)}") from failure
        if not isinstance(answer, dict):
            raise ApiUnavailable(f"{method} {path}: the answer is no JSON object")
        return answer

    async def _send(
        self, method: str, path: str, query: Mapping[str, str | int], body: Any, content_type: str, timeout_s: float
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "User-Agent": "fusecache-controller"}
        if content_type:
            headers["Content-Type"] = content_type
        # Reads the token of a service account again when it is a minute old.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self.server + path + ("?" + urlencode(query) if query else "")
        limit = aiohttp.ClientTimeout(total=timeout_s)
        answer = await self._client.rest_client.request(method, url, headers, body, _request_timeout=limit)
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _check(self, response: aiohttp.ClientResponse, method: str, path: str) -> None:
        self._count(method, str(response.status))
        if response.status >= 300:
            text = (await response.content.read(64 << 10)).decode(errors="replace")
            with contextlib.suppress(ValueError, TypeError, KeyError):  # something in between may answer in HTML
                text = str(json.loads(text)["message"])
            raise _error(response.status, text, method, path)

    def _count(self, method: str, code: str) -> None:
        self._metrics.counter("fusecache_controller_api_calls_total", method=method, code=code).inc()


def _error(status: int, text: str, method: str, path: str) -> CoSchedulingError:
    message = f"{method} {path}: {status} {cut(text)}"
    match status:
        case 401 | 403:
            return ApiRefused(message)
        case 404:
            return ObjectMissing(message)
        case 409 | 422:
            return PatchConflict(message)
        case 410:
            return WatchExpired(message)
        case _:
            return ApiUnavailable(message)


def _check_readable(kubeconfig: Path) -> None:
    """The client says of a file that is not there that it lacks a key. UsageError."""
    try:
        kubeconfig.open("rb").close()
    except OSError as failure:
        raise UsageError(f"kubeconfig {str(kubeconfig)!r} can't be read: {failure.strerror}") from None


def _why(failure: BaseException) -> str:
    return cut(f"{type(failure).__name__}: {failure}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of a watch, which may be longer than aiohttp's own line buffer. ValueError beyond MAX_EVENT_BYTES."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        searched = len(buffer)
        buffer += piece
        while (end := buffer.find(b"\n", searched)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            searched = 0
            if line:
                yield line
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def _pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"


def _lease_path(namespace: str, name: str = "") -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace, safe='')}/leases"
    return f"{path}/{quote(name, safe='')}" if name else path
