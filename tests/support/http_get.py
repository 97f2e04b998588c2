"""Asks a status server as a scraper or a probe does."""

from __future__ import annotations

import urllib.error
import urllib.request

ANSWER_S = 30.0


def http_get(address: str, path: str) -> tuple[int, str]:
    """(status, text), of a refusal too. URLError: nobody listens there."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=ANSWER_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as failure:
        with failure:
            return failure.code, failure.read().decode()
