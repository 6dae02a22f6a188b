"""`alpa-opt --server`, on standard input and output and on a Unix socket."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from alpa.tools.bench_server import chain
from test.processes import ended_on_failure

ALPA_OPT = Path(sys.executable).parent / "alpa-opt"
PROGRAM = """\
func.func @main(%x: tensor<64x8xf32>, %w: tensor<8x8xf32>) -> tensor<64x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
  return %0 : tensor<64x8xf32>
}
"""
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


class Client:
    """Sends requests and reads what comes back."""

    def __init__(self, writing: IO[bytes], reading: IO[bytes]) -> None:
        self.writing, self.reading = writing, reading
        self.number = 0

    def write(self, line: bytes) -> None:
        self.writing.write(line + b"\n")
        self.writing.flush()

    def send(self, method: str, **params: Any) -> int:
        self.number += 1
        message = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": params}
        self.write(json.dumps(message).encode())
        return self.number

    def read(self) -> dict[str, Any]:
        message = json.loads(self.reading.readline())
        assert message.pop("jsonrpc") == "2.0"
        return message

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer, a result or an error."""
        number = self.send(method, **params)
        answer = self.read()
        assert answer.pop("id") == number
        return answer

    def is_well(self) -> bool:
        return "result" in self.ask("run", module=PROGRAM, pipeline="cse")


@contextmanager
def started(*options: str | Path) -> Generator[subprocess.Popen[bytes]]:
    """A server with pipes, in a session of its own."""
    with (
        subprocess.Popen(
            [ALPA_OPT, "--server", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process,
        ended_on_failure(process),
    ):
        yield process


def client_of(process: subprocess.Popen[bytes]) -> Client:
    """The client on a server's standard input and output."""
    assert process.stdin is not None
    assert process.stdout is not None
    return Client(process.stdin, process.stdout)


@contextmanager
def serving(*options: str | Path) -> Generator[tuple[subprocess.Popen[bytes], Client]]:
    """A server on standard input and output, which must end well with its input."""
    with started(*options) as process:
        yield process, client_of(process)
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out, err) == (0, b"", b"")


@contextmanager
def listening(path: Path) -> Generator[subprocess.Popen[bytes]]:
    with started("--socket", path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"alpa-opt: listening at {path}\n".encode()
        yield process


@contextmanager
def connected(path: Path) -> Generator[Client]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        with connection.makefile("rwb") as file:
            yield Client(file, file)


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> tuple[int, bytes]:
    """The exit status, and what is said, after a signal. No process is left."""
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    # The processes of a search end by themselves once the one that they help has been killed.
    until = time.monotonic() + 100
    while is_left(process.pid):
        assert time.monotonic() < until
        time.sleep(0.05)
    return process.returncode, said


def is_left(group: int) -> bool:
    """Whether a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def request_of(server: int) -> int:
    """The process that runs the request of a server on standard input: a child of its child."""
    for _ in range(2):
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        server = int(children[0])
    return server


def test_requests_are_answered_in_order_until_the_input_ends() -> None:
    hello = {"jsonrpc": "2.0", "id": "a", "method": "hello"}
    params = {"module": PROGRAM, "pipeline": "canonicalize"}
    run = {"jsonrpc": "2.0", "id": "b", "method": "run", "params": params}
    given = f"{json.dumps(run)}\n\n  \n{json.dumps(hello)}".encode()
    done = subprocess.run([ALPA_OPT, "--server"], input=given, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["id"] == "b"
    assert first["result"]["module"].startswith("module {\n  func.func @main(%arg0:")
    assert second == {
        "jsonrpc": "2.0",
        "id": "a",
        "result": {
            "name": "alpa-opt",
            "version": second["result"]["version"],
            "protocol": 1,
            "max_request_bytes": 1 << 28,
        },
    }


def test_a_client_of_standard_input_gets_all_kinds_of_answers() -> None:
    with serving() as (_, client):
        plan = client.ask("run", module=PROGRAM, pipeline="alpa{cluster=cpu:1x2}")["result"]
        assert "alpa.program" in plan["module"]
        assert plan["seconds"]["ilp-shard-annotate"] > 0

        coded = client.ask("run", module=PROGRAM, pipeline="cse", output="bytecode")["result"]
        assert base64.b64decode(coded["bytecode"]).startswith(b"ML\xefR")
        back = client.ask("run", bytecode=coded["bytecode"], locations=True)["result"]
        assert 'loc("-":1:1)' in back["module"]

        nothing = client.ask("run", module=PROGRAM, output="none")["result"]
        assert nothing == {"diagnostics": [], "seconds": {}}


def test_remarks_and_errors_have_places() -> None:
    refused = PROGRAM.replace("%x, %w,", "%x, %y,")
    call = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @unknown(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
    with serving() as (_, client):
        plan = client.ask("run", module=call, pipeline="alpa{cluster=cpu:1x2}", file="call.mlir")
        (remark, *_) = plan["result"]["diagnostics"]
        assert (remark["severity"], remark["file"], remark["line"]) == ("remark", "call.mlir", 2)
        assert "@unknown" in remark["message"]

        error = client.ask("run", module=refused, pipeline="cse", file="step.mlir")["error"]
        assert error == {
            "code": -32000,
            "message": "step.mlir:2:34: error: use of undeclared SSA value name",
            "data": {
                "diagnostics": [
                    {
                        "severity": "error",
                        "file": "step.mlir",
                        "line": 2,
                        "column": 34,
                        "message": "use of undeclared SSA value name",
                    }
                ]
            },
        }

        pipeline = "alpa{cluster=cpu:1x2 num-stages=9}"
        error = client.ask("run", module=PROGRAM, pipeline=pipeline)["error"]
        assert (error["code"], error["data"]["diagnostics"][0]["file"]) == (-32000, "<request>")

        error = client.ask("run", module=PROGRAM, pipeline="alpa{clutser=cpu:1x2}")["error"]
        first, note = error["data"]["diagnostics"]
        assert (error["code"], first["file"], first["line"], first["column"]) == (
            -32602,
            "pipeline",
            1,
            6,
        )
        assert note["severity"] == "note"


def test_no_bad_request_ends_the_server() -> None:
    with serving("--max-request-bytes", "1000") as (_, client):
        for line, code in ((b"junk", -32700), (b"[]", -32600), (b"{}", -32600), (b"\xff", -32700)):
            client.write(line)
            answer = client.read()
            assert (answer["id"], answer["error"]["code"]) == (None, code)
        client.write(b'{"jsonrpc": "2.0", "id": 1, "params": "' + b"x" * 3_000_000 + b'"}')
        assert client.read() == {
            "id": None,
            "error": {
                "code": -32600,
                "message": "a line has more than 1000 bytes; --max-request-bytes raises the limit",
                "data": {"diagnostics": []},
            },
        }
        assert client.ask("stop")["error"]["code"] == -32601
        broken = base64.b64encode(b"ML\xefR\x0dgarbage\x00\x01\x02").decode()
        assert client.ask("run", bytecode=broken)["error"]["code"] == -32000
        assert client.is_well()


def test_progress_is_told_before_the_answer() -> None:
    with serving() as (_, client):
        number = client.send(
            "run", module=PROGRAM, pipeline="alpa{cluster=cpu:1x2}", output="none", progress=True
        )
        told: list[str] = []
        while "method" in (message := client.read()):
            assert message["method"] == "progress"
            assert message["params"]["id"] == number
            told.append(message["params"]["what"])
        assert message["id"] == number
        assert told[0] == "import-hlo"
        assert "ilp-shard-annotate: 0 of 1 meshes" in told


@NEEDS_PROC
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGABRT, "MLIR's C++ has crashed (SIGABRT)"),
        (signal.SIGKILL, "may have needed too much memory"),
        (signal.SIGINT, "interrupted"),
    ],
)
def test_a_request_whose_process_ends_is_an_error(number: signal.Signals, message: str) -> None:
    with serving() as (process, client):
        id = client.send("run", module=chain(2000), pipeline="alpa{cluster=cpu:2x4}", progress=True)
        assert client.read()["params"]["what"] == "import-hlo"
        os.kill(request_of(process.pid), number)
        while "method" in (answer := client.read()):
            pass
        assert (answer["id"], answer["error"]["code"]) == (id, -32001)
        assert message in answer["error"]["message"]
        assert client.is_well()


def test_an_interrupt_ends_the_server_and_its_request() -> None:
    with started() as process:
        client = client_of(process)
        client.send("run", module=chain(2000), pipeline="alpa{cluster=cpu:2x4}", progress=True)
        client.read()
        assert end(process, signal.SIGINT) == (130, b"alpa-opt: error: interrupted\n")


def test_a_client_that_reads_no_more_ends_its_request() -> None:
    with started() as process:
        client = client_of(process)
        client.send("run", module=chain(2000), pipeline="alpa{cluster=cpu:2x4}", progress=True)
        client.read()
        assert process.stdout is not None
        process.stdout.close()
        begin = time.monotonic()
        assert process.wait(timeout=100) == 1
        assert time.monotonic() - begin < 20
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_many_clients_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "alpa.sock"
    with listening(path) as process:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with connected(path) as first, connected(path) as second:
            assert second.is_well()
            assert first.is_well()
            with connected(path) as third:
                assert third.is_well()
            first.send("run", module=chain(2000), pipeline="alpa{cluster=cpu:2x4}", progress=True)
            first.read()
            assert second.is_well()  # while the first one's request runs
        with connected(path) as leaving:
            leaving.send("run", module=chain(2000), pipeline="alpa{cluster=cpu:2x4}", progress=True)
            leaving.read()
        with connected(path) as fourth:
            assert fourth.is_well()
            assert end(process, signal.SIGINT) == (130, b"alpa-opt: error: interrupted\n")
            assert fourth.reading.read() == b""
    assert not path.exists()


def test_sigterm_ends_a_socket_well(tmp_path: Path) -> None:
    path = tmp_path / "alpa.sock"
    with listening(path) as process, connected(path) as client:
        assert client.is_well()
        done = subprocess.run(
            [ALPA_OPT, "--server", "--socket", path], capture_output=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr == f"{path}: error: another server listens there\n".encode()
        assert end(process, signal.SIGTERM) == (0, b"")
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "alpa.sock"
    with listening(path) as process:
        process.kill()
        process.communicate(timeout=60)
    with listening(path) as process, connected(path) as client:
        assert client.is_well()
        assert end(process, signal.SIGTERM) == (0, b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "step.mlir"], "with --server, requests say what to do; drop FILE"),
        (["--server", "--pipeline=cse"], "drop --pipeline"),
        (["--server", "-o", "out.mlir"], "drop -o"),
        (["--server", "--timing"], "drop --timing"),
        (["--server", "--list-passes"], "drop --list-passes"),
        (["--socket", "s"], "--socket is for a server; add --server"),
        (["--max-request-bytes", "5"], "--max-request-bytes is for a server; add --server"),
        (["--server", "--max-request-bytes", "0"], "0 is less than 1"),
        (["--server", "--socket", "."], ".: error: there is another file, which is no socket"),
        (["--server", "--socket", ""], "error: there is another file, which is no socket"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str) -> None:
    done = subprocess.run(
        [ALPA_OPT, *options], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert message in done.stderr.decode()


def test_a_warm_server_has_imported_what_planning_needs() -> None:
    script = """\
import sys
from alpa.passes.pipelines.clock import Clock
from alpa.tools.run_pipeline import Source, run_pipeline
from alpa.tools.server.serve import warm

context = warm()
before = set(sys.modules)
source = Source(file="a", data=sys.stdin.buffer.read())
for intra in ("auto", "tapas"):
    options = f"cluster=cpu:2x4 num-layers=2 num-stages=2 intra={intra}"
    pipeline = f"alpa{{{options}}},export-stages"
    assert run_pipeline(context, source, pipeline, lambda said: None, Clock())
print(*sorted(name for name in sys.modules.keys() - before))
"""
    x, w = "tensor<64x8xf32>", "tensor<8x8xf32>"
    products = "\n".join(
        f"%{k + 1} = stablehlo.dot_general %{k}, %w, contracting_dims = [1] x [0]"
        f" : ({x}, {w}) -> {x}"
        for k in range(4)
    )
    products = products.replace("%0,", "%x,")
    chained = f"func.func @main(%x: {x}, %w: {w}) -> {x} {{\n{products}\nreturn %4 : {x}\n}}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=chained, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    late = [name for name in done.stdout.split() if name.startswith(("alpa.", "highspy"))]
    assert late == []


def alone(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process that may fork: this one has JAX and its threads."""
    head = "import os, signal\nfrom alpa.tools.server.child import Child\n"
    return subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, check=False
    )


def test_an_exception_in_a_child_is_printed_and_ends_it_alone() -> None:
    done = alone(
        """
def fail(file):
    raise ZeroDivisionError("by test")

print(Child.start(fail).wait(), Child.start(lambda file: None).wait())
"""
    )
    assert (done.returncode, done.stdout) == (0, "1 0\n")
    assert done.stderr.endswith("ZeroDivisionError: by test\n")


def test_a_child_that_ignores_an_interrupt_is_killed() -> None:
    done = alone(
        """
def wait(file):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(file, b"x")
    while True:
        signal.pause()

child = Child.start(wait)
assert os.read(child.file, 1) == b"x"
child.end(grace=0.1)
try:
    os.kill(child.pid, 0)
except ProcessLookupError:
    print("gone")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "gone\n", "")
