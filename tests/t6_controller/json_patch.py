"""RFC 6902 as the API server applies it: add, test and remove on plain JSON. For the double of the API."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


class TestFailed(Exception):
    """A `test` does not hold, or a path is not there."""

    __test__ = False  # pytest takes every Test* for tests


def apply(document: Any, patch: Sequence[Mapping[str, Any]]) -> Any:
    """The document after all operations; the original is left alone. TestFailed: none of them counts."""
    result = copy.deepcopy(document)
    for operation in patch:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent = result
        for part in parts[:-1]:
            parent = _step(parent, part)
        match operation["op"]:
            case "test":
                if _step(parent, parts[-1]) != operation["value"]:
                    raise TestFailed(operation["path"])
            case "add":
                _add(parent, parts[-1], copy.deepcopy(operation["value"]))
            case "remove":
                _step(parent, parts[-1])
                del parent[int(parts[-1]) if isinstance(parent, list) else parts[-1]]
            case other:
                raise AssertionError(f"the controller never sends {other!r}")
    return result


def merge(document: Any, patch: Mapping[str, Any]) -> Any:
    """RFC 7386: null removes."""
    result = copy.deepcopy(document)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merge(result.get(key) or {}, value)
        else:
            result[key] = value
    return result


def _step(parent: Any, part: str) -> Any:
    try:
        return parent[int(part)] if isinstance(parent, list) else parent[part]
    except (KeyError, IndexError, ValueError):
        raise TestFailed(part) from None


def _add(parent: Any, part: str, value: Any) -> None:
    if not isinstance(parent, list):
        parent[part] = value
    elif part == "-":
        parent.append(value)
    else:
        parent.insert(int(part), value)
