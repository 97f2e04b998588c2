"""A real API server answers as the double of tests/t6_controller does: what the controller's tests rest on."""

from __future__ import annotations

import pytest

from tests.cluster.api import JSON_PATCH, MERGE_PATCH, Refused
from tests.cluster.world import World
from tests.t6_controller.api_rules import RULES, pod_of

NAMESPACE = "opted-out"


@pytest.mark.parametrize("what", RULES)
def test_rule(world: World, what: str) -> None:
    rule = RULES[what]
    name = what.replace(" ", "-").replace("'", "").lower()
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
    # Nobody may bind it between the two calls.
    wanted = pod_of(rule, name, NAMESPACE)
    wanted["spec"]["schedulerName"] = "nobody"
    world.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods", wanted)
    try:
        pod = world.api.get(path)
        code, message = 200, ""
        try:
            if rule.status:
                world.api.patch(f"{path}/status", rule.patch(pod), MERGE_PATCH)
            else:
                world.api.patch(path, rule.patch(pod), JSON_PATCH)
        except Refused as refusal:
            code, message = refusal.status, refusal.message
        assert (code, rule.says in message) == (rule.code, True), message
    finally:
        world.api.delete(path, grace_period_s=0)
