"""The double of the API answers as a real server does (tests/cluster asks a real one the same)."""

from __future__ import annotations

import pytest

from tests.t6_controller.api_double import ApiDouble, Refused
from tests.t6_controller.api_rules import RULES, pod_of


@pytest.mark.parametrize("what", RULES)
def test_rule(api: ApiDouble, what: str) -> None:
    rule = RULES[what]
    pod = api.create("pods", pod_of(rule, "p", "default"))
    code, message = 200, ""
    try:
        api.patch("pods", "default/p", rule.status, rule.patch(pod), not rule.status)
    except Refused as refusal:
        code, message = refusal.code, str(refusal)
    assert (code, rule.says in message) == (rule.code, True), message
