"""A double of the Kubernetes API over HTTP that enforces the rules a real server was seen to enforce.

Lists in pages, watches with resume, bookmarks and 410, JSON and merge patches with their 409 and 422, the status
sub-resource, events, one kind of Lease. What may change on a pod is in `pod_rules`. Faults are asked for by the test:
`refuse`, `before_patch`, `forget_history`, `drop_watches`, `expire_pages`.

It knows no authorization and no admission policies; the tests against a real API server do.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.t6_controller import json_patch, pod_rules
from tests.t6_controller.api_rules import BARE

Json = dict[str, Any]
WAIT_S = 20.0


class Refused(Exception):
    """Answer with this status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ApiDouble:
    """The server; a context manager."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[str, dict[str, Json]] = {"pods": {}, "nodes": {}, "events": {}, "leases": {}}
        self._history: dict[str, list[tuple[int, Json]]] = {"pods": [], "nodes": []}
        self._version = 1000
        self._oldest = 0
        self._generation = 0
        """Raised to end the watches that are open."""
        self._refusals: list[tuple[str, str, int, str]] = []
        self._expire_pages = 0
        self.before_patch: Callable[[Json], None] | None = None
        """Called once, before the next patch of a pod, with the pod as it is: the change that comes in between."""
        self.binds = True
        """Bind pods without gates at once, as kube-scheduler would: to the pin, else to the nominated node."""
        self.calls: list[tuple[str, str]] = []
        """(method or WATCH, path) of everything that was asked."""
        self.authorizations: set[str] = set()

    # ---- for tests ----

    def __enter__(self) -> ApiDouble:
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="api-double")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
        self.drop_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    _closing = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig for it."""
        path = folder / "kubeconfig"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.address}}],
            "users": [{"name": "u", "user": {"token": "not-for-logs"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(document))
        return path

    def create(self, kind: str, item: Json) -> Json:
        """As POST, for objects of the test's own."""
        with self._changed:
            item = copy.deepcopy(item)
            metadata = item["metadata"]
            self._version += 1
            metadata.setdefault("uid", f"uid-{self._version}")
            metadata.setdefault("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            key = _key(item)
            if key in self._objects[kind]:
                raise Refused(409, f"{kind} {key!r} already exists")
            self._store(kind, key, item, "ADDED")
            return item

    def change(self, kind: str, key: str, change: Callable[[Json], None]) -> Json:
        """Change an object as another client would."""
        with self._changed:
            item = copy.deepcopy(self._objects[kind][key])
            change(item)
            self._version += 1
            self._store(kind, key, item, "MODIFIED")
            return item

    def delete(self, kind: str, key: str) -> None:
        with self._changed:
            item = copy.deepcopy(self._objects[kind].pop(key))
            self._version += 1
            item["metadata"]["resourceVersion"] = str(self._version)
            self._tell(kind, "DELETED", item)

    def get(self, kind: str, key: str) -> Json:
        with self._changed:
            return copy.deepcopy(self._objects[kind][key])

    def all(self, kind: str) -> list[Json]:
        with self._changed:
            return copy.deepcopy(list(self._objects[kind].values()))

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Until the condition holds; looked at after every change here, and now and then for others."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not condition():
                assert time.monotonic() < deadline, f"never came: {what}"
                self._changed.wait(0.05)

    def wait_for_calls(self, method: str, path: str, count: int) -> None:
        """Until a path was asked for so often."""
        self.wait_for(f"{count} x {method} {path}", lambda: self.calls.count((method, path)) >= count)

    def refuse(self, method: str, path: str, code: int, times: int, message: str = "refused by the test") -> None:
        """Answer the next calls of a path with an error."""
        with self._changed:
            self._refusals += [(method, path, code, message)] * times

    def refusals_left(self) -> int:
        with self._changed:
            return len(self._refusals)

    def allow_all(self) -> None:
        """No more refusals."""
        with self._changed:
            self._refusals.clear()

    def forget_history(self) -> None:
        """Watches that resume from before now get 410."""
        with self._changed:
            self._oldest = self._version + 1
            self._version += 1
            for history in self._history.values():
                history.clear()

    def drop_watches(self) -> None:
        """Cut all open watches."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def expire_pages(self, times: int) -> None:
        """The next second pages of lists get 410."""
        with self._changed:
            self._expire_pages = times

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """Answer nothing meanwhile."""
        with self._changed:
            yield

    # ---- the API ----

    def _store(self, kind: str, key: str, item: Json, event: str) -> None:
        item["metadata"]["resourceVersion"] = str(self._version)
        self._objects[kind][key] = item
        self._tell(kind, event, item)
        if kind == "pods" and self.binds and self._bindable(item):
            item = copy.deepcopy(item)
            item["spec"]["nodeName"] = _chosen(item, list(self._objects["nodes"]))
            self._version += 1
            self._store(kind, key, item, "MODIFIED")

    def _bindable(self, pod: Json) -> bool:
        spec = pod["spec"]
        return bool(not spec.get("schedulingGates") and not spec.get("nodeName") and self._objects["nodes"])

    def _tell(self, kind: str, event: str, item: Json) -> None:
        if kind in self._history:
            self._history[kind].append((self._version, {"type": event, "object": copy.deepcopy(item)}))
        self._changed.notify_all()

    def list_page(self, kind: str, query: dict[str, str]) -> Json:
        with self._changed:
            items = [self._objects[kind][key] for key in sorted(self._objects[kind])]
            start = int(query.get("continue", "0"))
            if start and self._expire_pages:
                self._expire_pages -= 1
                raise Refused(410, "The provided continue parameter is too old")
            end = start + min(int(query.get("limit", "500")), 3)  # small pages, so that every list has several
            metadata = {"resourceVersion": str(self._version)}
            if end < len(items):
                metadata["continue"] = str(end)
            return {"kind": "List", "metadata": metadata, "items": copy.deepcopy(items[start:end])}

    def watch(self, kind: str, query: dict[str, str]) -> Iterator[Json]:
        """Events, one at a time, until the time is over or the watches are cut."""
        seen = int(query["resourceVersion"])
        deadline = time.monotonic() + float(query["timeoutSeconds"])
        with self._changed:
            generation = self._generation
            if seen < self._oldest:
                yield {"type": "ERROR", "object": {"code": 410, "message": f"too old resource version: {seen}"}}
                return
        yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(seen)}}}
        while True:
            with self._changed:
                while self._generation == generation and not (events := self._newer(kind, seen)):
                    if not self._changed.wait(deadline - time.monotonic()):
                        return
                if self._generation != generation:
                    return
            for version, event in events:
                seen = version
                yield event

    def _newer(self, kind: str, seen: int) -> list[tuple[int, Json]]:
        return [(version, event) for version, event in self._history[kind] if version > seen]

    def patch(self, kind: str, key: str, status: bool, patch: Any, json_patches: bool) -> Json:
        with self._changed:
            if kind == "pods" and self.before_patch is not None:
                intrude, self.before_patch = self.before_patch, None
                intrude(copy.deepcopy(self._objects[kind][key]))
            old = self._existing(kind, key)
            if json_patches:
                try:
                    new = json_patch.apply(old, patch)
                except json_patch.TestFailed:
                    raise Refused(422, BARE) from None
            else:
                new = json_patch.merge(old, patch)
            if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
                raise Refused(409, "the object has been modified; please apply your changes to the latest version")
            if new["metadata"]["uid"] != old["metadata"]["uid"]:
                raise Refused(422, f'Pod "{key}" is invalid: metadata.uid: Invalid value: field is immutable')
            kept = {"spec", "metadata"} if status else {"status"}
            new = {**new, **{part: copy.deepcopy(old[part]) for part in kept if part in old}}
            if not status and (why := pod_rules.why_refused(old, new)):
                raise Refused(422, f'Pod "{key}" is invalid: {why}')
            self._version += 1
            self._store(kind, key, new, "MODIFIED")
            return copy.deepcopy(new)

    def replace(self, kind: str, key: str, item: Json) -> Json:
        with self._changed:
            old = self._existing(kind, key)
            if item["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
                raise Refused(409, "the object has been modified")
            self._version += 1
            self._store(kind, key, item, "MODIFIED")
            return copy.deepcopy(item)

    def read(self, kind: str, key: str) -> Json:
        with self._changed:
            return copy.deepcopy(self._existing(kind, key))

    def _existing(self, kind: str, key: str) -> Json:
        if key not in self._objects[kind]:
            raise Refused(404, f"{kind} {key!r} not found")
        return self._objects[kind][key]

    def called(self, method: str, path: str, authorization: str) -> None:
        """Note the call; raise the refusal that the test ordered."""
        with self._changed:
            if self._closing:
                raise Refused(503, "shutting down")
            self.calls.append((method, path))
            self.authorizations.add(authorization)
            self._changed.notify_all()
            for refusal in self._refusals:
                if refusal[:2] == (method, path):
                    self._refusals.remove(refusal)
                    raise Refused(*refusal[2:])


def _key(item: Json) -> str:
    namespace = item["metadata"].get("namespace")
    name = str(item["metadata"]["name"])
    return f"{namespace}/{name}" if namespace else name


def _chosen(pod: Json, nodes: list[str]) -> str:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    for term in (affinity.get(pod_rules.REQUIRED) or {}).get("nodeSelectorTerms") or ():
        for requirement in term.get("matchFields") or ():
            return str(requirement["values"][0])
    nominated = (pod.get("status") or {}).get("nominatedNodeName")
    return str(nominated if nominated in nodes else nodes[0])


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed is no error of ours
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    api: ApiDouble
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        kind, key, _, query = self._target()
        if key:
            self._answer("GET", lambda: self.api.read(kind, key))
        elif query.get("watch") == "true":
            self._watch(kind, query)
        else:
            self._answer("GET", lambda: self.api.list_page(kind, query))

    def do_PATCH(self) -> None:
        kind, key, status, _ = self._target()
        body = self._body()
        json_patches = self.headers["Content-Type"] == "application/json-patch+json"
        self._answer("PATCH", lambda: self.api.patch(kind, key, status, body, json_patches))

    def do_POST(self) -> None:
        kind, _, _, _ = self._target()
        body = self._body()
        namespace = self._path().split("/namespaces/")[1].split("/")[0]
        body["metadata"]["namespace"] = namespace
        self._answer("POST", lambda: self.api.create(kind, body))

    def do_PUT(self) -> None:
        kind, key, _, _ = self._target()
        body = self._body()
        self._answer("PUT", lambda: self.api.replace(kind, key, body))

    def _path(self) -> str:
        return urlsplit(self.path).path

    def _target(self) -> tuple[str, str, bool, dict[str, str]]:
        """(kind, namespace/name or name, status?, query)."""
        parts = [unquote(part) for part in self._path().split("/")][1:]
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        kind, name = parts[0], parts[1] if len(parts) > 1 else ""
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        return kind, f"{namespace}/{name}" if namespace and name else name, parts[2:] == ["status"], query

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, method: str, act: Callable[[], Json]) -> None:
        try:
            self.api.called(method, self._path(), self.headers.get("Authorization", ""))
            code, answer = 200, act()
        except Refused as refusal:
            code, answer = refusal.code, {"kind": "Status", "code": refusal.code, "message": str(refusal)}
        self._send(code, answer)

    def _send(self, code: int, answer: Json) -> None:
        data = json.dumps(answer).encode()
        with contextlib.suppress(ConnectionError):  # who asked may be gone
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def _watch(self, kind: str, query: dict[str, str]) -> None:
        try:
            self.api.called("WATCH", self._path(), self.headers.get("Authorization", ""))
        except Refused as refusal:
            self._send(refusal.code, {"code": refusal.code, "message": str(refusal)})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for event in self.api.watch(kind, query):
                data = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass  # the watcher went away

    def log_message(self, format: str, *args: Any) -> None:
        pass
