"""The evidence of a failed worker ends with the error that ended its script."""

from __future__ import annotations

from taskd.agent.worker_logs import end_with_error

TRACE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
RuntimeError: no data
"""
LEAKS = """\
nanobind: leaked 3 instances!
 - leaked instance 0x7f of type "torch._C._distributed_c10d.Store"
nanobind: leaked 9 functions!
 - leaked function "__init__"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""


def test_what_libraries_print_after_the_error_is_left_out() -> None:
    found = end_with_error(f"step 1\n{TRACE}{LEAKS}some other library says goodbye", TRACE)
    assert found == f"step 1\n{TRACE}".strip()


def test_error_that_was_pushed_out_of_the_last_lines_is_appended() -> None:
    assert end_with_error(LEAKS, TRACE) == f"{LEAKS}\n{TRACE}".strip()


def test_error_of_several_lines_is_kept() -> None:
    trace = f"{TRACE.rstrip()}: file a\nand file b\n"
    assert end_with_error(f"{trace}{LEAKS}", trace) == trace.strip()


def test_without_a_known_error_all_lines_but_reports_of_leaks_are_kept() -> None:
    assert end_with_error(f"{TRACE}{LEAKS}Aborted", "") == f"{TRACE}Aborted"
    assert end_with_error("", "") == ""
