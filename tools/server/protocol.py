"""The messages of the server: JSON-RPC 2.0, one message per line.

Requests are `hello` and `run`. While a request runs, its client may get notifications `progress`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

from alpa.dialects import is_bytecode
from alpa.passes.pipelines.diagnostics import Diagnostic, Place
from alpa.passes.pipelines.text import PipelineError, did_you_mean

PROTOCOL = 1
"""Grows if a client of an older one would misread the answers."""

NO_JSON = -32700
NO_REQUEST = -32600
NO_METHOD = -32601
BAD_PARAMS = -32602
REFUSED = -32000
"""MLIR or a pass has refused the program."""
ENDED = -32001
"""The process of the request has ended without an answer."""

Id = str | int | None
Output = Literal["text", "bytecode", "none"]
_VERSION = "2.0"


class RequestError(Exception):
    """A request cannot be run: a code of JSON-RPC and a sentence; None if the id is unknown."""

    def __init__(self, id: Id, code: int, message: str) -> None:
        super().__init__(message)
        self.id = id
        self.code = code
        self.message = message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Asks for the versions of the server and of the protocol."""

    id: Id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Asks for a module after a pipeline."""

    id: Id
    data: bytes
    """text or bytecode"""
    pipeline: str
    file: str
    """the name of the module in diagnostics"""
    output: Output
    locations: bool
    progress: bool


def read_request(line: bytes) -> Hello | Run:
    """The request of a line. Raises RequestError."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise RequestError(None, NO_JSON, "the line is JSON that is nested too deep") from error
    except ValueError as error:
        raise RequestError(None, NO_JSON, f"the line is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise RequestError(None, NO_REQUEST, "a request is one JSON object; batches are not read")
    message = cast(dict[str, Any], message)
    id = message.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise RequestError(None, NO_REQUEST, '"id" must be a string or a whole number')
    if message.get("jsonrpc") != _VERSION:
        raise RequestError(id, NO_REQUEST, f'"jsonrpc" must be "{_VERSION}"')
    method, params = message.get("method"), message.get("params", {})
    if not isinstance(method, str):
        raise RequestError(id, NO_REQUEST, '"method" must be a string')
    if not isinstance(params, dict):
        raise RequestError(id, BAD_PARAMS, '"params" must be an object')
    fields = _Fields(id, cast(dict[str, Any], params))
    if method == "hello":
        fields.check_known()
        return Hello(id=id)
    if method == "run":
        return _run(fields)
    raise RequestError(id, NO_METHOD, f"no method {json.dumps(method)}; there are hello and run")


def result(id: Id, value: dict[str, object]) -> bytes:
    """The line of an answer."""
    return _line({"id": id, "result": value})


def error(id: Id, code: int, message: str, diagnostics: Iterable[Diagnostic] = ()) -> bytes:
    """The line of an answer that is an error; `message` also says what the diagnostics say."""
    data = {"diagnostics": [written(each) for each in diagnostics]}
    return _line({"id": id, "error": {"code": code, "message": message, "data": data}})


def pipeline_error(id: Id, wrong: PipelineError) -> bytes:
    """The line of the answer to a pipeline whose text is wrong."""
    place = Place("pipeline", wrong.line, wrong.column)
    found = [Diagnostic("error", place, wrong.message)]
    if wrong.note:
        found.append(Diagnostic("note", place, wrong.note))
    return error(id, BAD_PARAMS, str(wrong), found)


def progress(id: Id, what: str, done: int, total: int) -> bytes:
    """The line of a notification; `done` of `total` have ended, 0 of 0 if nothing is counted."""
    params = {"id": id, "what": what, "done": done, "total": total}
    return _line({"method": "progress", "params": params})


def written(diagnostic: Diagnostic) -> dict[str, Any]:
    """A diagnostic as JSON has it; line and column are left out where they are unknown."""
    place = diagnostic.place
    position = {"line": place.line, "column": place.column} if place.line else {}
    return {
        "severity": diagnostic.severity,
        "file": place.file,
        **position,
        "message": diagnostic.message,
    }


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": _VERSION, **message}).encode() + b"\n"


def _run(fields: _Fields) -> Run:
    given = [name for name in ("module", "bytecode") if name in fields.params]
    if len(given) != 1:
        raise fields.error('give the program as either "module" (text) or "bytecode" (base64)')
    found = Run(
        id=fields.id,
        data=fields.text("module", "").encode() if given == ["module"] else fields.bytecode(),
        pipeline=fields.text("pipeline", ""),
        file=fields.text("file", "<request>"),
        output=fields.output(),
        locations=fields.flag("locations"),
        progress=fields.flag("progress"),
    )
    fields.check_known()
    return found


class _Fields:
    """The parameters of a request; raises RequestError for those that are wrong."""

    def __init__(self, id: Id, params: dict[str, Any]) -> None:
        self.id = id
        self.params = params
        self._known: list[str] = []

    def error(self, message: str) -> RequestError:
        return RequestError(self.id, BAD_PARAMS, message)

    def check_known(self) -> None:
        """Raises RequestError for a parameter that was not asked for."""
        for name in self.params:
            if name not in self._known:
                text = f"unknown parameter {json.dumps(name)}{did_you_mean(name, self._known)}"
                raise self.error(text)

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(f'"{name}" must be a string')
        try:
            value.encode()
        except UnicodeEncodeError as wrong:
            raise self.error(
                f'"{name}" is not Unicode: character {wrong.start} is a surrogate'
            ) from wrong
        return value

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise self.error(f'"{name}" must be true or false')
        return value

    def output(self) -> Output:
        value = self._get("output", "text")
        if value not in get_args(Output):
            raise self.error(f'"output" must be one of {", ".join(get_args(Output))}')
        return cast(Output, value)

    def bytecode(self) -> bytes:
        try:
            data = base64.b64decode(self.text("bytecode", ""), validate=True)
        except binascii.Error as wrong:
            raise self.error(f'"bytecode" is not base64: {wrong}') from wrong
        if not is_bytecode(data):
            raise self.error('"bytecode" does not begin as MLIR bytecode does')
        return data

    def _get(self, name: str, default: Any) -> Any:
        self._known.append(name)
        return self.params.get(name, default)
