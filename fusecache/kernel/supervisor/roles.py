"""What each kind of part is given: flags, sockets, memfds. When it starts, `agents`, `gates` and `workers` say.

agent:  --plan-fd --epoch-fd --agent-socket --gate-fd --control-fd [--ready-fd]
gate:   --control-fd --mountpoint; device, table of open inodes and settings come with its first message
worker: --index --requests-fd --slots-fd --offers-fd --plan-fd --epoch-fd --agent-socket --open-mode --device-number
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fusecache.kernel.channel import Channel, Message, socket_pair
from fusecache.kernel.privileges import give_up, keep_for_gate
from fusecache.kernel.reply_slots import create_slots
from fusecache.kernel.spec import MountSpec
from fusecache.kernel.supervisor.parts import Part
from fusecache.kernel.supervisor.restart_policy import RestartPolicy

REQUEST_BUFFER_BYTES: Final = 1 << 20
"""Of a worker's socket, each way. Answers are 64 KiB at most (READ data goes through slots), so that even without
CAP_NET_ADMIN the system's default of 208 KiB holds one."""

LINK_BUFFER_BYTES: Final = 4 << 20
"""Between agent and gate: pushes of up to 128 KiB wait there."""

AGENT_FIRST_DELAY_S: Final = 0.1


class PartWithChannel(Part):
    """One that the supervisor talks with."""

    def __init__(self, name: str, policy: RestartPolicy) -> None:
        super().__init__(name, policy)
        self.channel: Channel | None = None

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Tell it, if it runs."""
        if self.running and self.channel is not None:
            self.channel.send(message, descriptors)

    def receive(self) -> list[Message]:
        """What it has said; its last words too, once its process has ended."""
        return [] if self.channel is None else self.channel.receive()

    def close(self) -> None:
        """Close our end of a former process's socket."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Agent(PartWithChannel):
    """Metadata, control socket, metrics. Reads go on without it."""

    def __init__(self) -> None:
        super().__init__("agent", RestartPolicy(AGENT_FIRST_DELAY_S))
        self.gate_link: socket.socket | None = None
        """The gate's end; kept here too, for the next gate."""

    def launch(self, spec: MountSpec, epoch_fd: int, environment: Mapping[str, str], ready_fd: int | None) -> None:
        """Start it with fresh sockets."""
        self.close()
        ours, control = socket_pair()
        self.gate_link, link = socket_pair(LINK_BUFFER_BYTES)
        self.channel = Channel(ours)
        descriptors = [spec.plan_fd, epoch_fd, link.fileno(), control.fileno()]
        argv = [
            *spec.agent_argv,
            *("--plan-fd", str(spec.plan_fd)),
            *("--epoch-fd", str(epoch_fd)),
            *("--agent-socket", spec.agent_socket),
            *("--gate-fd", str(link.fileno())),
            *("--control-fd", str(control.fileno())),
        ]
        if ready_fd is not None:
            descriptors.append(ready_fd)
            argv += ["--ready-fd", str(ready_fd)]
        with control, link:
            self.start(argv, descriptors, environment, lambda: give_up(spec.identity))

    def hand_to(self, gate: Gate, *, again: bool) -> None:
        """Give the gate its end of the link between the two. `again`: a former gate had it."""
        if self.gate_link is not None:
            gate.send({"kind": "agent", "again": again}, (self.gate_link.fileno(),))

    def close(self) -> None:
        """Close our ends of a former process's sockets."""
        super().close()
        if self.gate_link is not None:
            self.gate_link.close()
            self.gate_link = None


class Gate(PartWithChannel):
    """Between the device and the workers. Also the one that stands by to take over its process (`adopt`)."""

    def __init__(self, name: str = "gate") -> None:
        super().__init__(name, RestartPolicy())
        self.failure = ""
        """Its own last words."""

    def launch(self, spec: MountSpec, environment: Mapping[str, str]) -> None:
        """Start it; it stands by until `begin`."""
        self.close()
        self.failure = ""
        ours, control = socket_pair()
        self.channel = Channel(ours)
        argv = [*spec.gate_argv, *("--control-fd", str(control.fileno())), *("--mountpoint", spec.mountpoint)]
        with control:
            self.start(argv, [control.fileno()], environment, keep_for_gate)

    def adopt(self, spare: Gate) -> None:
        """Go on with the process of `spare`, which stands by."""
        self.close()
        self.failure = ""
        self.channel, spare.channel = spare.channel, None
        self.started(spare.pid)
        spare.ended()
        spare.started_at_s = 0.0  # the next one to stand by is the first of its kind again, no restart

    def begin(self, spec: MountSpec, device_fd: int, table_fd: int, settings: Mapping[str, Any]) -> None:
        """Let it serve `device_fd`, a clone of its own; the table of open inodes outlives it in `table_fd`."""
        everything = {
            **spec.gate_settings,
            **settings,
            "features": [row.name for row in spec.features.rows if row.usable],
            "spin_us": spec.spin_us,
            "max_read_bytes": spec.max_read_bytes,
            "slots": spec.slots,
            "slot_bytes": spec.max_read_bytes,
            "log_level": spec.log_level,
        }
        self.send({"kind": "begin", "settings": everything}, (device_fd, table_fd))


class Worker(Part):
    """Answers requests: pyfuse3 on one end of a socket instead of /dev/fuse."""

    def __init__(self, index: int) -> None:
        super().__init__(f"worker {index}", RestartPolicy())
        self.index = index
        self._gate_ends: tuple[int, ...] = ()
        """Requests, slots, offers: what the gate has, kept here too for the next one. A worker outlives its gate."""

    def launch(
        self, spec: MountSpec, epoch_fd: int, open_mode: str, device_number: str, environment: Mapping[str, str]
    ) -> None:
        """Start it with fresh sockets and slots; `hand_to` the gate then."""
        self.close()
        gate_requests, requests = socket_pair(REQUEST_BUFFER_BYTES)
        gate_offers, offers = socket_pair()
        slots = create_slots(spec.slots, spec.max_read_bytes)
        self._gate_ends = (gate_requests.detach(), slots, gate_offers.detach())
        argv = [
            *spec.worker_argv,
            *("--index", str(self.index)),
            *("--requests-fd", str(requests.fileno())),
            *("--slots-fd", str(slots)),
            *("--offers-fd", str(offers.fileno())),
            *("--plan-fd", str(spec.plan_fd)),
            *("--epoch-fd", str(epoch_fd)),
            *("--agent-socket", spec.agent_socket),
            *("--open-mode", open_mode),
            *("--device-number", device_number),
        ]
        descriptors = [requests.fileno(), slots, offers.fileno(), spec.plan_fd, epoch_fd]
        with requests, offers:
            self.start(argv, descriptors, environment, lambda: give_up(spec.identity))

    def hand_to(self, gate: Gate) -> None:
        """Give the gate its ends; each gate once. One that was ready has answered INIT to another gate."""
        if self.running and gate.running:
            message = {"kind": "worker", "index": self.index, "pid": self.pid, "initialised": self.ready}
            gate.send(message, self._gate_ends)

    def ended(self) -> None:
        """Its end was seen: the gate's ends are of no use any more."""
        super().ended()
        self.close()

    def close(self) -> None:
        """Close the gate's ends here."""
        for descriptor in self._gate_ends:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._gate_ends = ()
