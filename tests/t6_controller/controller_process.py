"""A real `fusecache controller` against the double, and streams of nodes over real gRPC."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from fusecache.pb.locality import locality_pb2 as pb
from fusecache.pb.locality import locality_pb2_grpc
from tests.support.command import ROOT, environment
from tests.support.http_get import http_get
from tests.support.mounting import command
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.objects import report

STOP_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class ControllerProcess:
    """The command, leading (unless told not to wait); a context manager that ends it with SIGTERM and wants 0."""

    def __init__(self, api: ApiDouble, folder: Path, *, leads: bool = True, **placement: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.status_address = f"127.0.0.1:{free_port()}"
        document = {
            "metrics_address": self.status_address,
            "placement": {"listen_address": "127.0.0.1:0", "kubeconfig": str(api.kubeconfig(folder)), **placement},
        }
        file = folder / "controller.yaml"
        file.write_text(json.dumps(document))
        self._errors = folder / "stderr"
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command(), "controller", "--config", str(file)],
                env=environment(folder),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), self._errors.read_text()
        self.address = line.split()[-1]
        if leads:
            api.wait_for("the lead", lambda: self.get("/readyz")[0] == 200)

    def __enter__(self) -> ControllerProcess:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = self.stop()
        assert kind is not None or code == 0, f"exit code {code}"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code. What it wrote goes to the test's own standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            self.process.stdout.close()
            sys.stderr.write(self._errors.read_text())
        return self.process.returncode

    def logged(self) -> str:
        return self._errors.read_text()

    def get(self, path: str) -> tuple[int, str]:
        return http_get(self.status_address, path)


class NodeStream:
    """One node's stream of reports; a context manager."""

    def __init__(self, address: str, node_name: str, held: Mapping[str, int] | None = None) -> None:
        self.node_name = node_name
        self._outgoing: queue.SimpleQueue[pb.NodeReport | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        stub = locality_pb2_grpc.LocalityStub(self._channel)
        self.call = stub.Report(iter(self._outgoing.get, None), wait_for_ready=True, timeout=60)
        self.sequence = 0
        if held is not None:
            self.send(held)

    def __enter__(self) -> NodeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self.call.cancel()
        self._channel.close()

    def send(self, held: Mapping[str, int], **more: Any) -> None:
        """The next report; full the first time."""
        self.sequence += 1
        given = {"sequence": self.sequence, "full": self.sequence == 1, **more}
        self.put(report(self.node_name, dict(held), **given))

    def put(self, message: pb.NodeReport) -> None:
        self._outgoing.put(message)

    def directives(self) -> Iterator[pb.Directive]:
        yield from self.call

    def end(self) -> tuple[grpc.StatusCode, str]:
        """Wait for the server to end it."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as failure:
            return failure.code(), str(failure.details())
        return grpc.StatusCode.OK, ""
