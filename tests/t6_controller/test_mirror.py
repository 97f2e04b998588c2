"""Listing and watching over HTTP: pages, resuming, 410, errors; and what the API client makes of bad answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusecache.controller import kube as kube_module
from fusecache.controller.kube import NODES, PODS, KubeApi
from fusecache.controller.mirror import Mirror
from fusecache.controller.model import Pod, pod_from_json
from fusecache.errors import (
    ApiRefused,
    ApiUnavailable,
    CoSchedulingError,
    ObjectMissing,
    PatchConflict,
    UsageError,
    WatchExpired,
)
from fusecache.metrics import Metrics
from tests.support import log_noise
from tests.t6_controller.api_double import ApiDouble
from tests.t6_controller.objects import pod_json
from tests.t6_controller.rig import run


class Following:
    """A mirror of pods that follows the double."""

    def __init__(self, kube: KubeApi, metrics: Metrics) -> None:
        self.changes = 0
        self.lists = metrics.counter("fusecache_controller_lists_total", resource="pods")
        self.mirror: Mirror[Pod] = Mirror(kube, PODS, pod_from_json, self._changed, metrics, lambda pod: pod.waiting)

    def _changed(self) -> None:
        self.changes += 1

    def names(self) -> set[str]:
        return {pod.name for pod in self.mirror.values.values()}

    async def has(self, *names: str) -> None:
        async with asyncio.timeout(20):
            while self.names() != set(names):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def following(api: ApiDouble, folder: Path) -> AsyncIterator[Following]:
    metrics = Metrics(show_unused=False)
    async with await KubeApi.connect(api.kubeconfig(folder), metrics) as kube:
        made = Following(kube, metrics)
        task = asyncio.create_task(made.mirror.run())
        try:
            await made.mirror.synced.wait()
            yield made
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            api.drop_watches()


def create(api: ApiDouble, *names: str) -> None:
    for name in names:
        api.create("pods", pod_json(name))


def test_all_pages_are_listed_and_changes_followed(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, *"abcdefgh")
        async with following(api, tmp_path) as made:
            assert made.names() == set("abcdefgh")
            assert api.calls.count(("GET", PODS)) == 3  # the double gives three objects a page
            create(api, "new")
            api.delete("pods", "default/a")
            await made.has(*"bcdefgh", "new")
            assert made.lists.value == 1

    run(story)


def test_selected_are_those_that_wait(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, "a", "b")
        async with following(api, tmp_path) as made:
            assert set(made.mirror.selected) == {"default/a", "default/b"}
            api.change("pods", "default/a", lambda pod: pod["spec"].update(schedulingGates=[]))
            api.change("pods", "default/b", lambda pod: pod["metadata"].update(deletionTimestamp="now"))
            async with asyncio.timeout(20):
                while made.mirror.selected:
                    await asyncio.sleep(0.01)
            assert made.names() == {"a", "b"}

    run(story)


def test_cut_watch_goes_on_where_it_was(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, "a")
        async with following(api, tmp_path) as made:
            for number in range(3):
                watches = api.calls.count(("WATCH", PODS))
                api.drop_watches()
                create(api, f"n{number}")  # nobody watches at this moment, as like as not
                await made.has("a", *(f"n{seen}" for seen in range(number + 1)))
                assert api.calls.count(("WATCH", PODS)) > watches
            assert made.lists.value == 1

    run(story)


def test_forgotten_version_lists_again_and_sees_what_is_gone(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("watch_failed", count=1)

    async def story() -> None:
        create(api, "a", "b")
        async with following(api, tmp_path) as made:
            api.refuse("WATCH", PODS, 503, 1)  # so that the deletion is in nobody's watch
            api.drop_watches()
            api.delete("pods", "default/a")
            api.forget_history()
            await made.has("b")
            assert made.lists.value == 2

    run(story)


def test_watch_refused_with_410_lists_again(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, "a")
        async with following(api, tmp_path) as made:
            api.refuse("WATCH", PODS, 410, 1)
            api.drop_watches()
            async with asyncio.timeout(20):
                while made.lists.value < 2:
                    await asyncio.sleep(0.01)
            create(api, "b")
            await made.has("a", "b")

    run(story)


def test_list_whose_pages_expire_begins_again(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, *"abcd")
        api.expire_pages(1)
        async with following(api, tmp_path) as made:
            assert made.names() == set("abcd")
            assert api.calls.count(("GET", PODS)) == 4

    run(story)


def test_server_that_fails_is_asked_again_and_the_trouble_is_told(
    api: ApiDouble, tmp_path: Path, expected_logs: log_noise.Declare
) -> None:
    expected_logs("watch_failed", count=3)

    async def story() -> None:
        create(api, "a")
        api.refuse("GET", PODS, 403, 1, "no rights yet")
        async with following(api, tmp_path) as made:
            assert made.mirror.trouble == ""
            assert api.refusals_left() == 0
            api.refuse("WATCH", PODS, 503, 2, "etcd is away")
            api.drop_watches()
            async with asyncio.timeout(20):
                while "etcd is away" not in made.mirror.trouble:
                    await asyncio.sleep(0.01)
            create(api, "b")
            await made.has("a", "b")
            assert made.mirror.trouble == ""

    run(story)


def test_answer_to_our_write_is_newer_than_the_watch(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        create(api, "a", "b")
        async with following(api, tmp_path) as made:
            old = api.get("pods", "default/a")
            newer = {**old, "metadata": {**old["metadata"], "resourceVersion": "999999"}, "spec": {}}
            made.mirror.put(newer)
            assert not made.mirror.values["default/a"].gated
            made.mirror.put(old)  # as an event of the watch that was under way
            assert not made.mirror.values["default/a"].gated
            gone = api.get("pods", "default/b")
            api.delete("pods", "default/b")
            await made.has("a")
            made.mirror.put(gone)  # the answer to a patch comes after the pod is deleted
            assert made.names() == {"a"}

    run(story)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (401, ApiRefused), (403, ApiRefused), (404, ObjectMissing), (409, PatchConflict), (422, PatchConflict),
        (410, WatchExpired), (429, ApiUnavailable), (500, ApiUnavailable), (503, ApiUnavailable), (400, ApiUnavailable),
    ],
)  # fmt: skip
def test_every_refusal_has_a_class(api: ApiDouble, tmp_path: Path, code: int, error: type[CoSchedulingError]) -> None:
    async def story() -> None:
        api.refuse("GET", NODES, code, 1, "because\n" + "x" * 1000)
        async with await KubeApi.connect(api.kubeconfig(tmp_path), Metrics(show_unused=False)) as kube:
            with pytest.raises(CoSchedulingError) as failure:
                await kube.list_objects(NODES)
            assert type(failure.value) is error
            assert f"GET {NODES}: {code} because" in str(failure.value)
            assert len(str(failure.value)) < 400

    run(story)


def test_server_that_hangs_is_given_up(api: ApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_module, "CALL_S", 0.2)

    async def story() -> None:
        async with await KubeApi.connect(api.kubeconfig(tmp_path), Metrics(show_unused=False)) as kube:
            with api.stuck(), pytest.raises(ApiUnavailable, match=r"no answer within 0\.2 s"):
                await kube.list_objects(NODES)

    run(story)


def test_nobody_listening_is_unavailable(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        with ApiDouble() as gone:
            kubeconfig = gone.kubeconfig(tmp_path)
        async with await KubeApi.connect(kubeconfig, Metrics(show_unused=False)) as kube:
            with pytest.raises(ApiUnavailable, match="ClientConnectorError"):
                await kube.list_objects(NODES)

    run(story)


def test_credentials_are_sent(api: ApiDouble, tmp_path: Path) -> None:
    async def story() -> None:
        async with await KubeApi.connect(api.kubeconfig(tmp_path), Metrics(show_unused=False)) as kube:
            await kube.list_objects(NODES)
        assert api.authorizations == {"Bearer not-for-logs"}

    run(story)


@pytest.mark.parametrize("content", ["", "]", "{}", "clusters: 5", None])
def test_kubeconfig_that_can_not_be_used_is_named(
    tmp_path: Path, content: str | None, expected_logs: log_noise.Declare
) -> None:
    expected_logs("Config not found", optional=True)  # the client's own word on a file that is not there

    async def story() -> None:
        path = tmp_path / "kubeconfig"
        if content is not None:
            path.write_text(content)
        with pytest.raises(UsageError, match="kubeconfig"):
            await KubeApi.connect(path, Metrics(show_unused=False))

    run(story)


def test_outside_of_a_pod_a_kubeconfig_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def story() -> None:
        with pytest.raises(UsageError, match="give --kubeconfig FILE"):
            await KubeApi.connect(None, Metrics(show_unused=False))

    run(story)
