"""Reads a cluster's TOML file, with an error at the line for whatever is wrong in it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import inf
from typing import Any, TypeVar, cast, get_args

from alpa.passes.cost.device import (
    Call,
    ClusterError,
    Collective,
    Collectives,
    Cost,
    Curve,
    Device,
    Efficiency,
    Link,
    Machine,
    Points,
    Transfer,
    size_of,
    size_problem,
)
from alpa.passes.text_files import read_text

Key = tuple[str, ...]

_KEYS: dict[Key, Key] = {
    (): ("hosts", "devices_per_host", "device", "intra_host", "inter_host"),
    ("device",): ("name", "memory", "peak_flops", "memory_bandwidth"),
    ("device", "efficiency"): ("matrix", "memory"),
    ("device", "call"): ("start",),
    ("device", "step"): ("start",),
    ("intra_host",): ("bandwidth", "latency"),
    ("inter_host",): ("bandwidth", "latency"),
    ("intra_host", "transfer"): ("bandwidth", "latency"),
    ("inter_host", "transfer"): ("bandwidth", "latency"),
    ("between",): ("bandwidth", "latency"),
    ("between", "transfer"): ("bandwidth", "latency"),
}
"""What a section must have, if it is there."""
_MORE: dict[Key, Key] = {
    (): ("calibration",),
    ("device",): ("usable_memory", "efficiency", "launch", "call", "step", "alone"),
    ("device", "efficiency"): ("convolution", "elementwise"),
    ("device", "call"): ("per_argument", "per_shard"),
    ("device", "step"): ("per_argument", "per_shard"),
    ("intra_host",): ("overlap", "transfer_overlap", "collectives", "transfer"),
    ("inter_host",): ("overlap", "transfer_overlap", "collectives", "transfer"),
    ("between",): ("transfer",),
}
"""What it may have."""
_HOSTS = ("count", "devices_per_host", "device")
"""What an entry of ``[[hosts]]`` has."""
_TYPES = (
    "f4E2M1FN",
    "f6E2M3FN",
    "f6E3M2FN",
    "f8",
    "f8E3M4",
    "f8E4M3",
    "f8E4M3B11FNUZ",
    "f8E4M3FN",
    "f8E4M3FNUZ",
    "f8E5M2",
    "f8E5M2FNUZ",
    "f8E8M0FNU",
    "bf16",
    "f16",
    "tf32",
    "f32",
    "f64",
    "complex<f32>",
    "complex<f64>",
    "i1",
    "i2",
    "i4",
    "i8",
    "i16",
    "i32",
    "i64",
    "ui2",
    "ui4",
    "ui8",
    "ui16",
    "ui32",
    "ui64",
)
"""Element types, as MLIR writes them; `f8` stands for all of 8 bits."""
LEAST_MEMORY = 2**20
"""Bytes. A smaller number is no memory of a device, but meant as a share or in another unit."""
T = TypeVar("T")

_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")


def read_cluster_file(path: str) -> tuple[int, int, Machine]:
    """Hosts, devices per host and the machine that the TOML file at ``path`` describes.

    Raises ``ClusterError`` with file and line.
    """
    return _reader(path).read()


def read_hosts_file(path: str) -> tuple[list[tuple[str, int, int, str]], Link | None] | None:
    """What a TOML file lists under ``[[hosts]]``; None if it describes equal hosts.

        [[hosts]]
        count = 2
        devices_per_host = 8
        device = "a100-40gb"     # a preset, such as v100-16gb,ideal, or a TOML file beside this one

        [between]                # hosts of different kinds; optional
        bandwidth = 3.125e9
        latency = 20e-6

    Returns the place of each entry, its hosts, the devices of each, and the device; and the link.
    Raises ``ClusterError`` with file and line.
    """
    reader = _reader(path)
    return reader.read_hosts() if reader.lists_hosts else None


def _reader(path: str) -> _Reader:
    try:
        text = read_text(path)
    except OSError as error:
        raise ClusterError(
            f"cannot read the cluster file {path!r}: {error.strerror}; give the path of a TOML "
            "file, or a preset with a shape such as h100:1x8"
        ) from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"a cluster file is UTF-8 text: {error}", path) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"not valid TOML: {error}", _place_in(text, path, error)) from error
    return _Reader(table, _key_lines(text), _entries(text), path)


def _place_in(text: str, path: str, error: tomllib.TOMLDecodeError) -> str:
    """Where the text stops being valid TOML; only Python 3.14 gives it as numbers."""
    found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    if found is None:  # at the end of the document
        return f"{path}:{text.count(chr(10)) + 1}"
    return f"{path}:{found[1]}:{found[2]}"


def _key_lines(text: str) -> dict[Key, int]:
    """The line (from 1) where each key or table stands; keys of inline tables have their line."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _split(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            parts = _split(key[1])
            for length in range(1, len(parts) + 1):
                lines.setdefault((*table, *parts[:length]), number)
    return lines


def _entries(text: str) -> list[dict[str, int]]:
    """Of each entry ``[[hosts]]``, the lines (from 1) of its keys, and of its header under `""`."""
    found: list[dict[str, int]] = []
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = header[1]
            if table == "hosts":
                found.append({"": number})
        elif table == "hosts" and (key := _KEY.match(line)):
            found[-1].setdefault(_split(key[1])[0], number)
    return found


def _split(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


class _Reader:
    def __init__(
        self,
        table: dict[str, Any],
        lines: Mapping[Key, int],
        entries: Sequence[Mapping[str, int]],
        path: str,
    ) -> None:
        self._table = table
        self._lines = lines
        self._entries = entries
        self._path = path

    def read(self) -> tuple[int, int, Machine]:
        for where in _KEYS:
            if self._has(where):
                self._check_keys(where)
        name = self._value(("device", "name"))
        if not isinstance(name, str):
            raise self._error(("device", "name"), f"name must be a string, not {name!r}")
        hosts, devices = self._count(("hosts",)), self._count(("devices_per_host",))
        problem = size_problem(hosts, devices)
        if problem is not None:
            raise self._error(("hosts",), problem)
        machine = Machine(
            device=Device(
                name=name,
                memory=self._usable(),
                peak_flops=self._by_type(("device", "peak_flops"), self._positive),
                memory_bandwidth=self._positive(("device", "memory_bandwidth")),
                efficiency=self._efficiency() if self._has(("device", "efficiency")) else None,
                launch=self._optional(("device", "launch"), self._seconds, 0.0),
                call=self._optional(("device", "call"), self._call, Call()),
                step=self._optional(("device", "step"), self._call, None),
                alone=self._optional(("device", "alone"), self._points, ()),
            ),
            intra_host=self._link("intra_host"),
            inter_host=self._link("inter_host"),
        )
        return hosts, devices, machine

    @property
    def lists_hosts(self) -> bool:
        """Whether there are entries ``[[hosts]]``."""
        return isinstance(self._table.get("hosts"), list)

    def read_hosts(self) -> tuple[list[tuple[str, int, int, str]], Link | None]:
        """See `read_hosts_file`."""
        for key in self._table:
            if key not in ("hosts", "between"):
                raise self._error((key,), f"unknown key {key!r} beside [[hosts]]; known: between")
        for where in (("between",), ("between", "transfer")):
            if self._has(where):
                self._check_keys(where)
        entries: list[Any] = self._table["hosts"]
        if not entries:
            raise self._error(
                ("hosts",),
                "hosts is an empty list; give the number of equal hosts, or an entry [[hosts]] "
                "for each kind",
            )
        found: list[tuple[str, int, int, str]] = []
        for number, entry in enumerate(entries, start=1):
            # A list in one line, `hosts = [{...}]`, has no headers.
            lines = self._entries[number - 1] if self._entries else {"": self._lines[("hosts",)]}
            place = f"{self._path}:{lines['']}"
            keys = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
            for key in keys:
                if key not in _HOSTS:
                    raise ClusterError(
                        f"unknown key {key!r} in [[hosts]] number {number}; {_known(key, _HOSTS)}",
                        f"{self._path}:{lines.get(key, lines[''])}",
                    )
            if {*keys} != {*_HOSTS}:
                raise ClusterError(
                    f"[[hosts]] number {number} must have {', '.join(_HOSTS)}", place
                )
            sizes = [keys[key] for key in _HOSTS[:2]]
            for key, value in zip(_HOSTS, sizes, strict=False):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    message = f"{key} must be a whole number from 1 on, not {value!r}"
                    raise ClusterError(f"[[hosts]] number {number}: {message}", place)
            device = keys["device"]
            if not isinstance(device, str):
                raise ClusterError(f"[[hosts]] number {number}: device must be a string", place)
            found.append((place, cast("int", sizes[0]), cast("int", sizes[1]), device))
        return found, self._link("between") if "between" in self._table else None

    def _check_keys(self, where: Key) -> None:
        section, needed = self._section(where), _KEYS[where]
        known = needed + _MORE.get(where, ())
        title = f"[{'.'.join(where)}]" if where else "the cluster file"
        for key in section:
            if key not in known:
                message = f"unknown key {key!r} in {title}; {_known(key, known)}"
                raise self._error((*where, key), message)
        self._need(where, section, needed)

    def _need(self, where: Key, section: Mapping[str, object], needed: Key) -> None:
        title = f"[{'.'.join(where)}]" if where else "the cluster file"
        for key in needed:
            if key not in section:
                raise self._error(where, f"{title} lacks {key!r}; it needs {', '.join(needed)}")

    def _has(self, key: Key) -> bool:
        return key == () or (self._has(key[:-1]) and key[-1] in self._section(key[:-1]))

    def _error(self, key: Key, message: str) -> ClusterError:
        while key and key not in self._lines:
            key = key[:-1]
        return ClusterError(message, f"{self._path}:{self._lines.get(key, 1)}")

    def _value(self, key: Key) -> object:
        value: Any = self._table
        for part in key:
            value = value[part]
        return value

    def _section(self, key: Key) -> dict[str, object]:
        value = self._value(key)
        if isinstance(value, list):
            count = len(cast("list[object]", value))
            raise self._error(
                key,
                f"{key[-1]} is a list of {count}: hosts, their devices and their links are "
                f"all equal; write one [{'.'.join(key)}], and plan for equal hosts only",
            )
        if not isinstance(value, dict):
            raise self._error(key, f"{key[-1]} must be a table, not {value!r}")
        return cast("dict[str, object]", value)

    def _number(self, key: Key, fits: Callable[[float], bool], expected: str) -> float:
        """A number that fits; ``expected`` says in an error which ones do."""
        value = self._value(key)
        if isinstance(value, list):
            raise self._error(
                key,
                f"{key[-1]} must be one number, not {value!r}: hosts, their devices and their "
                "links are all equal; plan for equal hosts only",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"{key[-1]} must be a number, not {value!r}")
        if not fits(value):
            raise self._error(key, f"{key[-1]} must {expected}, not {value!r}")
        return value

    def _positive(self, key: Key) -> float:
        return float(self._number(key, lambda x: 0 < x < inf, "be greater than 0 and finite"))

    def _count(self, key: Key) -> int:
        expected = "be a whole number from 1 on"
        return int(self._number(key, lambda x: isinstance(x, int) and x >= 1, expected))

    def _seconds(self, key: Key) -> float:
        expected = "not be negative or infinite"
        return float(self._number(key, lambda x: 0 <= x < inf, expected))

    def _fraction(self, key: Key) -> float:
        return float(self._number(key, lambda x: 0 < x <= 1, "be greater than 0 and at most 1"))

    def _optional(self, key: Key, read: Callable[[Key], T], default: T) -> T:
        return read(key) if self._has(key) else default

    def _by_type(self, key: Key, read: Callable[[Key], T]) -> dict[str, T]:
        """Figures by element type."""
        for name in self._section(key):
            if name not in _TYPES:
                message = f"unknown element type {name!r} in {key[-1]}; {_known(name, _TYPES)}"
                raise self._error((*key, name), message)
        figures = {name: read((*key, name)) for name in self._section(key)}
        if "f32" not in figures:
            raise self._error(
                key, f"{key[-1]} lacks 'f32', which stands for every type that is not listed"
            )
        return figures

    def _efficiency(self) -> Efficiency:
        where = ("device", "efficiency")
        return Efficiency(
            matrix=self._points_by_type((*where, "matrix")),
            memory=self._points((*where, "memory")),
            convolution=self._optional((*where, "convolution"), self._points_by_type, {}),
            elementwise=self._optional((*where, "elementwise"), self._points, ()),
        )

    def _points_by_type(self, key: Key) -> dict[str, Points]:
        return self._by_type(key, self._points)

    def _call(self, key: Key) -> Call:
        return Call(*(self._optional((*key, name), self._seconds, 0.0) for name in Call._fields))

    def _points(self, key: Key) -> Points:
        """Sizes and shares, such as ``[[1e6, 0.5], [1e9, 0.9]]``."""
        return self._rising(key, "[size, share]", "shares greater than 0 and at most 1", 1.0)

    def _rising(self, key: Key, pair: str, figures: str, most: float) -> Points:
        """Sizes that rise, and figures of at most ``most``; the texts describe them in errors."""
        points = self._value(key)
        if (
            not isinstance(points, list)
            or not points
            or not all(_is_point(it, most) for it in cast("list[object]", points))
        ):
            raise self._error(
                key,
                f"{key[-1]} must be a list of {pair} with sizes from 1 on and {figures}, not "
                f"{points!r}",
            )
        found = tuple((float(size), float(figure)) for size, figure in cast("list[Any]", points))
        if any(one[0] >= other[0] for one, other in pairwise(found)):
            raise self._error(key, f"the sizes of {key[-1]} must rise")
        return found

    def _link(self, name: str) -> Link:
        return Link(
            bandwidth=self._positive((name, "bandwidth")),
            latency=self._seconds((name, "latency")),
            overlap=self._optional((name, "overlap"), self._share, 0.0),
            transfer_overlap=self._optional((name, "transfer_overlap"), self._share, 0.0),
            collectives=self._optional((name, "collectives"), self._collectives, {}),
            transfer=self._optional((name, "transfer"), self._transfer, None),
        )

    def _transfer(self, key: Key) -> Transfer:
        return Transfer(
            bandwidth=self._positive((*key, "bandwidth")), latency=self._seconds((*key, "latency"))
        )

    def _share(self, key: Key) -> float:
        return float(self._number(key, lambda x: 0 <= x < 1, "be at least 0 and less than 1"))

    def _collectives(self, key: Key) -> Collectives:
        """By kind and group size, such as ``all-reduce.8 = { alpha = 3e-5, beta = 2e11 }``."""
        found: dict[Collective, dict[int, Cost | Curve]] = {}
        for kind in self._section(key):
            if kind not in get_args(Collective):
                known = ", ".join(get_args(Collective))
                raise self._error((*key, kind), f"unknown collective {kind!r}; known: {known}")
            sizes = found[cast("Collective", kind)] = {}
            for size in self._section((*key, kind)):
                where = (*key, kind, size)
                if not size.isdecimal() or int(size) < 2:
                    raise self._error(where, f"{size!r} is no size of a group from 2 on")
                sizes[int(size)] = self._collective(where)
        return found

    def _collective(self, key: Key) -> Cost | Curve:
        """Alpha and beta, or a list of bytes and seconds."""
        if isinstance(self._value(key), list):
            return Curve(self._rising(key, "[bytes, seconds]", "seconds greater than 0", inf))
        self._need(key, self._section(key), ("alpha", "beta"))
        return Cost(self._seconds((*key, "alpha")), 1 / self._positive((*key, "beta")))

    def _usable(self) -> int:
        """Bytes for a program: of the device, or a share of them up to 1, or a size of its own."""
        memory, key = self._memory(("device", "memory")), ("device", "usable_memory")
        if not self._has(key):
            return memory
        value = self._value(key)
        if isinstance(value, float) or value == 1:
            return int(memory * self._fraction(key))
        usable = self._memory(key)
        if usable < LEAST_MEMORY:
            raise self._error(
                key,
                f"usable_memory is {value!r}, which is {usable:,} bytes; give a share of the "
                "device's memory up to 1, such as 0.9, or a size from 1MiB on, such as '14GiB'",
            )
        if usable > memory:
            raise self._error(key, f"usable_memory is more than the device's {memory:,} bytes")
        return usable

    def _memory(self, key: Key) -> int:
        value = self._value(key)
        if not isinstance(value, str):
            count = self._count(key)
            if key[-1] == "memory" and count < LEAST_MEMORY:
                raise self._error(
                    key,
                    f"memory is {count} bytes, less than a device has; give the unit, such as "
                    f'"16GiB", or at least {LEAST_MEMORY} bytes',
                )
            return count
        try:
            return size_of(value)
        except ValueError as error:
            raise self._error(key, f"{key[-1]} {error}") from error


def _known(name: str, known: Sequence[str]) -> str:
    """What an unknown name may be meant as."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _is_point(point: object, most: float) -> bool:
    """Whether it is a size and a figure of at most ``most``."""
    match point:
        case [int() | float() as size, int() | float() as figure]:
            return 1 <= size < inf and 0 < figure <= most and figure < inf
        case _:
            return False
