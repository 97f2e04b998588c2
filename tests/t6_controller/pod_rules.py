"""What a real API server (1.37.2) refuses when a pod is changed, with its words. For the double of the API.

`api_rules` holds it to the truth: its cases are asked of a real server too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_FIELDS = "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def why_refused(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Why the change of a pod is invalid; empty when it may be made."""
    old_spec, new_spec = old["spec"], new["spec"]
    old_gates = [gate["name"] for gate in old_spec.get("schedulingGates") or ()]
    new_gates = [gate["name"] for gate in new_spec.get("schedulingGates") or ()]
    if added := [gate for gate in new_gates if gate not in old_gates]:
        return f"spec.schedulingGates: Forbidden: only deletion is allowed, but found new scheduling gate '{added[0]}'"
    mutable = {"schedulingGates", "affinity", "nodeSelector"} if old_gates else {"schedulingGates"}
    for key in {*old_spec, *new_spec} - mutable:
        if old_spec.get(key) != new_spec.get(key):
            return f"{OTHER_FIELDS} ({key})"
    old_selector, new_selector = old_spec.get("nodeSelector") or {}, new_spec.get("nodeSelector") or {}
    if any(new_selector.get(key) != value for key, value in old_selector.items()):
        return "spec.nodeSelector: Invalid value: only additions to spec.nodeSelector are allowed"
    old_affinity, new_affinity = old_spec.get("affinity") or {}, new_spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        if old_affinity.get(kind) != new_affinity.get(kind):
            return f"{OTHER_FIELDS} (affinity.{kind})"
    return _why_node_affinity_refused(old_affinity.get("nodeAffinity") or {}, new_affinity.get("nodeAffinity") or {})


def _why_node_affinity_refused(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    old_terms = (old.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    new_terms = (new.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    for term in new_terms:
        for requirement in term.get("matchFields") or ():
            if requirement["key"] != "metadata.name" or requirement["operator"] not in ("In", "NotIn"):
                return "nodeSelectorTerms.matchFields: Invalid value"
            if len(requirement["values"]) != 1:
                return "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
    if not old_terms:
        return ""
    if len(old_terms) != len(new_terms):
        return (
            "nodeSelectorTerms: Invalid value: no additions/deletions to non-empty NodeSelectorTerms list are allowed"
        )
    for old_term, new_term in zip(old_terms, new_terms, strict=True):
        if not old_term and new_term:
            return "nodeSelectorTerms: Invalid value: an empty term may not be changed"
        for key in ("matchExpressions", "matchFields"):
            before, after = old_term.get(key) or [], new_term.get(key) or []
            if after[: len(before)] != before:
                return "nodeSelectorTerms: Invalid value: only additions are allowed (no mutations or deletions)"
    return ""
