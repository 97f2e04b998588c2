"""The agent of a mount behind the gate: everything that no read waits for. The composition root.

    plan -> `MountCore` (cluster, metadata, upkeep) -> sample for `auto` -> "prepared" -> the supervisor mounts, starts
         gate and workers -> "serving" -> control socket, pushes through the gate, status over HTTP -> ready

Workers ask it for metadata that their own view of the store does not have (`metadata_service`); their counters are
added to its own. It may be killed at any moment: reads go on, and the next agent goes on with the store.

Has no access to the kernel's device, serves no request, and may be another user than who mounts (`run_as_user`).
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import trio

import fusecache
from fusecache import logs
from fusecache.alluxio.model import Block, block_id_of
from fusecache.cache.board import BoardWriter
from fusecache.cache.known import ROOT
from fusecache.cache.record import Entry
from fusecache.clock import SystemClock
from fusecache.config.settings import LogLevel, MountPlan
from fusecache.daemon import mountpoint as mountpoints
from fusecache.daemon import open_mode_choice
from fusecache.daemon.gate_metrics import record
from fusecache.daemon.gated import from_memfd
from fusecache.daemon.metadata_service import MetadataService
from fusecache.daemon.mount_core import Cluster, MountCore, build_info, only_error
from fusecache.daemon.open_mode_choice import SampledFile
from fusecache.daemon.supervisor_link import SupervisorLink
from fusecache.errors import UNEXPECTED, FusecacheError, MountError, ProtocolError, StateError, Unavailable, told
from fusecache.fs.invalidation import Push
from fusecache.kernel.gate_link import GateLink
from fusecache.kernel.process_name import set_process_name
from fusecache.kernel.ready_pipe import ReadyPipe
from fusecache.kernel.supervisor.first_look import LOOK_S
from fusecache.metrics import Metrics
from fusecache.rpc.budget import Budget
from fusecache.threads import in_thread

log = structlog.get_logger(__name__)

LOOK_MARGIN_S = 5.0
"""Beyond the supervisor's own limit for the first look."""

MAX_SERVED = 100_000
"""Blocks to be touched that are remembered."""

ADDRESS_AGAIN_S = 10.0
"""Between tries to listen at `metrics_address`, which somebody else has."""

FOLDER_QUESTIONS = 8
"""Blocks of the sample for which a block worker is asked where they lie; one answer is enough."""


class Agent(MountCore):
    """One mount's agent, wired."""

    def __init__(
        self,
        plan: MountPlan,
        cluster: Cluster,
        *,
        board: BoardWriter,
        gate: GateLink,
        supervisor: SupervisorLink,
        agent_socket: Path,
        why: str,
        metrics: Metrics,
        clock: SystemClock,
    ) -> None:
        """`why`: the reason of the open mode that the machine allows, until a sample gives another."""
        super().__init__(
            plan,
            cluster,
            metrics=metrics,
            clock=clock,
            notify=self._push,
            take_served=self._take_served,
            board=board,
        )
        self._gate = gate
        self._supervisor = supervisor
        self._why = why
        self._folder_questions = FOLDER_QUESTIONS
        self._served: dict[int, None] = {}
        self._serving: dict[str, Any] = {}
        self._service = MetadataService(
            agent_socket,
            self.tree,
            cluster.store,
            metrics=metrics,
            metadata_budget_s=plan.settings.metadata_budget_s,
            on_stale_read=self.heal_stale,
            list_again=self.list_again,
            extra={
                "hidden": self._hidden,
                "capacity": self._capacity,
                "served": self._note_served,
                "confirm": self._confirm,
            },
        )

    async def serve(self, open_mode: str, ready: ReadyPipe, announcement: str, *, first: bool) -> None:
        """Until the supervisor is gone. `open_mode` "auto" = choose. `first`: of this mount, so that whatever is wrong
        is an error of its start."""
        try:
            async with trio.open_nursery() as nursery:
                said, heard = trio.open_memory_channel[dict[str, Any]](8)
                nursery.start_soon(self._supervisor.listen, said)
                await self.prepare(nursery)
                await nursery.start(self._service.run)
                await nursery.start(self._serve_status, first)
                if open_mode == "auto":
                    open_mode, self._why = open_mode_choice.choose(await self._sample())
                prepared = {"open_mode": open_mode, "why": self._why, "cluster_id": self.identity.cluster_id}
                self._supervisor.say_now({"kind": "prepared", **prepared})
                async for message in heard:
                    if message["kind"] == "serving" and not self._serving:
                        self._serving = message
                        if self._supervisor.control is None:
                            raise ProtocolError("the supervisor sent no control socket")
                        mounted = mountpoints.find_mount(self.plan.mountpoint)
                        await self.run(nursery, mounted, self._supervisor.control)
                        nursery.start_soon(self._announce, ready, announcement)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_error(group) from group
        finally:
            self.ready = False
            self.invalidator.close()

    async def look(self) -> None:
        """By the supervisor, who may enter the folders above the mount point. MountError when the mount fails."""
        number = await self._supervisor.look(LOOK_S + LOOK_MARGIN_S)
        if number != 0:
            why = "the supervisor does not answer" if number is None else os.strerror(number)
            raise MountError(f"{self.plan.mountpoint}: mounted, but the first request failed: {why}")

    async def describe(self) -> dict[str, Any]:
        """For `status`."""
        table = await self._supervisor.status()
        serving = {key: value for key, value in self._serving.items() if key != "kind"}
        return {
            **serving,
            "pid": os.getppid(),  # the supervisor's: the process that was started, and takes signals
            "why": self._why,
            "parts": table.get("parts", []),
            "gate": await in_thread(self._gate_status),
        }

    async def measure(self) -> Metrics:
        """The agent's own, all workers', the gate's and the supervisor's."""
        gathered = await self._service.gathered_metrics()
        gate = await in_thread(self._gate_status)
        record(gathered, gate, (await self._supervisor.status()).get("parts", ()))
        return gathered

    async def set_log_level(self, level: LogLevel) -> None:
        """Here and in all workers."""
        await super().set_log_level(level)
        await self._service.set_log_level(level)

    async def _announce(self, ready: ReadyPipe, announcement: str) -> None:
        def say() -> None:
            if announcement:
                print(announcement, flush=True)
            ready.ready()

        await self.announce(say)
        self._supervisor.say_now({"kind": "ready"})

    async def _serve_status(self, first: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """/metrics and health; scraped from a thread, which asks the loop.

        StateError when the address can't be had, for the first agent. A later one has more to do than that: it tries
        again from time to time.
        """
        token = trio.lowlevel.current_trio_token()

        def exposition() -> str:
            return trio.from_thread.run(self.measure, trio_token=token).exposition()

        for attempt in itertools.count():
            try:
                with self.status_server(self.plan.settings, exposition):
                    if attempt == 0:
                        task_status.started()
                    await trio.sleep_forever()
            except StateError as failure:
                if first:
                    raise
                log.warning("status is not served over HTTP now", reason=str(failure), again_in_s=ADDRESS_AGAIN_S)
            if attempt == 0:
                task_status.started()
            await trio.sleep(ADDRESS_AGAIN_S)

    def _push(self, push: Push) -> None:
        """In the invalidator's thread."""
        kind, inode, name = push
        if kind == "entry":
            self._gate.invalidate_entry(inode, name)
        else:
            self._gate.invalidate_inode(inode, attr_only=kind == "attributes")

    def _gate_status(self) -> dict[str, Any]:
        try:
            return self._gate.status()
        except OSError as error:
            return {"error": error.strerror}

    async def _take_served(self, most: int) -> list[int]:
        """Blocks that workers opened, and those that the gate opened without them."""
        taken = [block_id for block_id, _ in zip(self._served, range(most), strict=False)]
        for block_id in taken:
            del self._served[block_id]
        if len(taken) < most:
            try:
                opened = await in_thread(self._gate.take_opened, most - len(taken))
            except (OSError, Unavailable) as error:
                log.debug("the gate told no opened files", error=str(error))
            else:
                taken += [block_id_of(inode - 1, index) for inode, index in opened]
        return taken

    async def _sample(self) -> list[SampledFile]:
        """Files from the top of the data set, as far as SAMPLE_S goes."""
        sample: list[SampledFile] = []
        folders = [ROOT]
        with trio.move_on_after(open_mode_choice.SAMPLE_S):
            for seen in range(open_mode_choice.MOST_FOLDERS):
                if seen >= len(folders) or len(sample) >= open_mode_choice.MOST_FILES:
                    break
                try:
                    entries = await self.tree.children(folders[seen], 0, open_mode_choice.MOST_FILES - len(sample))
                except FusecacheError as error:
                    log.info("a folder of the sample can't be listed", error=str(error))
                    continue
                folders += [entry.inode for entry in entries if entry.folder]
                files = [entry for entry in entries if entry.completed and not entry.folder]
                sample += await in_thread(self._sampled, files)
        return sample

    def _sampled(self, files: Sequence[Entry]) -> list[SampledFile]:
        """In a thread. A local block that is met tells, by a call, where this node's block worker keeps its blocks."""
        sample = []
        for entry in files:
            local = False
            if entry.block_count == 1 and self.plan.settings.zero_rpc_reads:
                locations = entry.locations[0] if entry.locations else ()
                block = Block(block_id_of(entry.inode - 1, 0), entry.length, locations, None, 0, 0, False)
                descriptor = self.client.open_local(block)
                if descriptor is None and locations and self._folder_questions:
                    self._folder_questions -= 1
                    descriptor = self.client.learn_local(block, Budget(self.clock, open_mode_choice.SAMPLE_S))
                if descriptor is not None:
                    local = True
                    os.close(descriptor)
            sample.append(SampledFile(entry.length, local))
        return sample

    # ---- what workers ask beside metadata ----

    async def _hidden(self, message: dict[str, Any]) -> dict[str, Any]:
        name = message.get("name")
        if name == "stats":
            return {"content": (await self.measure()).exposition()}
        if name == "config":
            return {"content": json.dumps(self.control.describe_config(), indent=2) + "\n"}
        if name == "version":
            return {"content": f"fusecache {fusecache.__version__}\n"}
        raise ProtocolError("no such file")

    async def _capacity(self, message: dict[str, Any]) -> dict[str, Any]:
        return dict(self.upkeep.capacity()._asdict())

    async def _note_served(self, message: dict[str, Any]) -> dict[str, Any]:
        blocks = message.get("blocks")
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise ProtocolError("blocks is no list of numbers")
        for block in blocks[: MAX_SERVED - len(self._served)]:
            self._served[block] = None
        return {}

    async def _confirm(self, message: dict[str, Any]) -> dict[str, Any]:
        """Make Alluxio compare a folder with its under storage; when that was asked for."""
        folder = message.get("folder")
        if type(folder) is not int:
            raise ProtocolError("folder is no inode")
        asked_at = self.clock.now()
        await self.tree.refresh(folder, force_sync=True)
        return {"asked_at": asked_at}


def main(arguments: Sequence[str]) -> int:
    """The exit code; errors before "prepared" are the supervisor's to tell."""
    parser = argparse.ArgumentParser(prog="fusecache.daemon.agent", description=__doc__, add_help=False)
    for flag in ("--plan-fd", "--epoch-fd", "--gate-fd", "--control-fd"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--agent-socket", type=Path, required=True)
    parser.add_argument("--open-mode", required=True)
    parser.add_argument("--announcement", default="")
    parser.add_argument("--why", default="")
    flags = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()  # the supervisor ends a stuck agent by ABRT
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = from_memfd(flags.plan_fd, MountPlan)
    set_process_name("agent", str(plan.mountpoint))
    logs.configure(plan.settings.log_level, plan.settings.log_format)
    supervisor = SupervisorLink(flags.control_fd)
    try:
        with ExitStack() as stack:
            clock = SystemClock()
            metrics = Metrics()
            build_info(metrics)
            cluster = Cluster(plan, stack, metrics=metrics, clock=clock)
            board = BoardWriter(flags.epoch_fd)
            stack.callback(board.close)
            gate = GateLink(flags.gate_fd)
            stack.callback(gate.close)
            agent = Agent(
                plan,
                cluster,
                board=board,
                gate=gate,
                supervisor=supervisor,
                agent_socket=flags.agent_socket,
                why=flags.why,
                metrics=metrics,
                clock=clock,
            )
            first = flags.ready_fd is not None
            serve = partial(agent.serve, first=first)
            trio.run(serve, flags.open_mode, ReadyPipe(flags.ready_fd), flags.announcement if first else "")
    except FusecacheError as failure:
        supervisor.say_now({"kind": "failed", "exit_code": failure.exit_code, "text": told(failure)})
        return failure.exit_code
    except Exception as failure:  # noqa: BLE001 - the outermost frame: printed whole, told by the exit code
        traceback.print_exc()
        text = f"a bug in fusecache: {type(failure).__name__}: {failure}"
        supervisor.say_now({"kind": "failed", "exit_code": UNEXPECTED, "text": text})
        return UNEXPECTED
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main(sys.argv[1:]))
