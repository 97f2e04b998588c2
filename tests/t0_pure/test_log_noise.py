"""The log-noise check itself: what counts, what a test may declare."""

from tests.support.log_noise import Expectation, check, records

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in f
    boom()
ValueError: boom"""


def test_records_of_quiet_output_are_none() -> None:
    assert records("INFO     x:y.py:1 event='mounted' errors=0\nall good\n") == []


def test_records_join_a_traceback_with_the_line_above_it() -> None:
    text = f"\x1b[31m2026-01-01 [error    ] handler_failed op=read\x1b[0m\n{TRACEBACK}\nfine\nERROR    a:b.py:1 other"
    found = records(text)
    assert len(found) == 2
    assert "handler_failed" in found[0]
    assert found[0].endswith("ValueError: boom")


def test_records_keep_a_later_traceback_apart() -> None:
    assert len(records(f"WARNING  a:b.py:1 first\nquiet line\n{TRACEBACK}\n")) == 2


def test_check_reports_undeclared_noise() -> None:
    assert check([("Captured stderr call", '{"level": "warning", "event": "x"}')], [])


def test_check_accepts_declared_noise_with_its_count() -> None:
    sections = [("Captured log call", "WARNING  a:b.py:1 event='retry'\nWARNING  a:b.py:1 event='retry'")]
    assert check(sections, [Expectation("retry", 2)]) == []
    assert check(sections, [Expectation("retry", None)]) == []


def test_check_reports_a_wrong_count_and_noise_that_did_not_come() -> None:
    sections = [("Captured log call", "WARNING  a:b.py:1 event='retry'")]
    assert check(sections, [Expectation("retry", 2)]) == ["declared 2 of 'retry', saw 1"]
    assert check([], [Expectation("retry", None)]) == ["declared at least 1 of 'retry', saw 0"]


def test_log_noise_of_a_test_that_runs_beside_is_no_problem_and_counts_where_it_is_declared() -> None:
    said = '{"level": "warning", "event": "unmounted here, but another mount namespace still has the mount"}\n'
    assert check([("stderr", said)], []) == []
    assert check([("stderr", said)], [Expectation("another mount namespace", 1)]) == []
    assert check([("stderr", "")], [Expectation("another mount namespace", 1)]) != []


def test_log_noise_of_a_client_that_left_grpcs_server_is_no_problem_but_another_traceback_is() -> None:
    left = "ERROR    grpc._cython.cygrpc:events.py:80 ExecuteBatchError raised in core by servicer method [/a.B/C]"
    assert check([("log", f"{left}\n{TRACEBACK}")], []) == []
    assert check([("log", f"{left}\nquiet line\n{TRACEBACK}")], []) != []
