"""The benchmark of the server times what it says."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse
from alpa.tools.bench_server import chain, main, time_requests


def test_the_program_has_so_many_ops_and_keeps_them() -> None:
    module = parse(chain(10))
    assert len(body(main_function(module)).operations) == 11  # with the return


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ops", "5", "--runs", "2"])
    title, header, _, request, command = capsys.readouterr().out.splitlines()
    assert title == "`canonicalize` on 5 ops"
    assert header == "| by | ms, fastest | ms, median | processor ms | runs |"
    assert request.startswith("| a request |")
    assert request.endswith("| 2 |")
    assert command.startswith("| `alpa-opt` |")
    assert command.endswith("| 1 |")


def test_a_pipeline_that_fails_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown pass 'no-such-pass'"):
        time_requests(chain(1), "no-such-pass", runs=1)
