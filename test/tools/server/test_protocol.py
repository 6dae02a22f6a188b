"""Each line is a request, or an error that names what is wrong with it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from alpa.passes.pipelines.diagnostics import Diagnostic, Place
from alpa.tools.server import protocol
from alpa.tools.server.protocol import Hello, RequestError, Run

BYTECODE = b"ML\xefR rest"


def line(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 7, **fields}).encode()


def run(**params: Any) -> bytes:
    return line(method="run", params=params)


def test_a_request_has_defaults() -> None:
    assert protocol.read_request(run(module="module {}")) == Run(
        id=7,
        data=b"module {}",
        pipeline="",
        file="<request>",
        output="text",
        locations=False,
        progress=False,
    )


def test_all_parameters_are_read() -> None:
    given = run(
        bytecode=base64.b64encode(BYTECODE).decode(),
        pipeline="cse",
        file="step.mlir",
        output="none",
        locations=True,
        progress=True,
    )
    assert protocol.read_request(given) == Run(
        id=7,
        data=BYTECODE,
        pipeline="cse",
        file="step.mlir",
        output="none",
        locations=True,
        progress=True,
    )


@pytest.mark.parametrize("id", ["a", "", 0, -3])
def test_hello_and_ids(id: str | int) -> None:
    assert protocol.read_request(line(id=id, method="hello")) == Hello(id=id)


@pytest.mark.parametrize(
    ("given", "id", "code", "message"),
    [
        (b"junk", None, -32700, "the line is not JSON: Expecting value"),
        (b'{"id": 1', None, -32700, "the line is not JSON"),
        (b"\xff\xfe{}", None, -32700, "the line is not JSON"),
        (b"[" * 100_000, None, -32700, "nested too deep"),
        (b"[]", None, -32600, "one JSON object; batches are not read"),
        (b"7", None, -32600, "one JSON object"),
        (line(id=None, method="hello"), None, -32600, '"id" must be a string or a whole'),
        (line(id=True, method="hello"), None, -32600, '"id" must be'),
        (line(id=1.5, method="hello"), None, -32600, '"id" must be'),
        (line(id=[], method="hello"), None, -32600, '"id" must be'),
        (b'{"jsonrpc": "2.0", "method": "hello"}', None, -32600, '"id" must be'),
        (b'{"id": 7, "method": "hello"}', 7, -32600, '"jsonrpc" must be "2.0"'),
        (line(), 7, -32600, '"method" must be a string'),
        (line(method="stop"), 7, -32601, 'no method "stop"; there are hello and run'),
        (line(method="run", params=[]), 7, -32602, '"params" must be an object'),
        (line(method="hello", params={"x": 1}), 7, -32602, 'unknown parameter "x"'),
        (run(), 7, -32602, 'either "module" (text) or "bytecode" (base64)'),
        (run(module="", bytecode=""), 7, -32602, 'either "module" (text) or "bytecode"'),
        (run(module=1), 7, -32602, '"module" must be a string'),
        (run(module="\ud800"), 7, -32602, '"module" is not Unicode: character 0 is a surrogate'),
        (run(bytecode="?"), 7, -32602, '"bytecode" is not base64'),
        (run(bytecode=1), 7, -32602, '"bytecode" must be a string'),
        (run(bytecode="bW9kdWxl"), 7, -32602, "does not begin as MLIR bytecode does"),
        (run(module="", pipeline=["cse"]), 7, -32602, '"pipeline" must be a string'),
        (run(module="", output="html"), 7, -32602, "must be one of text, bytecode, none"),
        (run(module="", output=[]), 7, -32602, '"output" must be one of'),
        (run(module="", progress=1), 7, -32602, '"progress" must be true or false'),
        (
            run(module="", pipline="cse"),
            7,
            -32602,
            "unknown parameter \"pipline\"; did you mean 'pipeline'?",
        ),
    ],
)
def test_a_wrong_request(given: bytes, id: int | None, code: int, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        protocol.read_request(given)
    assert (caught.value.id, caught.value.code) == (id, code)
    assert message in caught.value.message


def test_answers_are_lines_of_json() -> None:
    found = [
        Diagnostic("error", Place("a.mlir", 2, 3), "wrong\nhere"),
        Diagnostic("note", Place("unknown"), "why"),
    ]
    answer = protocol.error("x", protocol.REFUSED, "a.mlir:2:3: error: wrong", found)
    assert answer.count(b"\n") == 1
    assert json.loads(answer) == {
        "jsonrpc": "2.0",
        "id": "x",
        "error": {
            "code": -32000,
            "message": "a.mlir:2:3: error: wrong",
            "data": {
                "diagnostics": [
                    {
                        "severity": "error",
                        "file": "a.mlir",
                        "line": 2,
                        "column": 3,
                        "message": "wrong\nhere",
                    },
                    {"severity": "note", "file": "unknown", "message": "why"},
                ]
            },
        },
    }
