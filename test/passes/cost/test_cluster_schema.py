"""The schema of cluster files allows what the reader does, and nothing that it refuses."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from alpa.passes.cost import cluster_file
from alpa.passes.cost.cluster import ClusterError, parse_cluster
from alpa.passes.cost.presets import IDEAL, PRESETS
from alpa.runtime.calibration.fit import Fit
from alpa.runtime.calibration.text import calibrated_text
from test.schemas import read_schema, undescribed

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = read_schema("alpa.passes.cost", "cluster.schema.json")
VALIDATOR = Draft202012Validator(SCHEMA)
FILE = """\
hosts = 2
devices_per_host = 8
[device]
name = "mine"
memory = "16GiB"
usable_memory = 0.9
peak_flops = { f16 = 125e12, f32 = 15.7e12 }
memory_bandwidth = 900e9
call = { start = 1e-4 }
[device.efficiency]
matrix = { f32 = [[1e9, 0.75]] }
memory = [[1e6, 0.6], [1e8, 0.9]]
[intra_host]
bandwidth = 150e9
latency = 5e-6
overlap = 0.5
transfer_overlap = 0.25
collectives.all-reduce.8 = { alpha = 31e-6, beta = 267e9 }
collectives.all-reduce.4 = [[16e3, 25e-6], [4e6, 2e-3]]
transfer = { bandwidth = 2.7e9, latency = 1e-4 }
[inter_host]
bandwidth = 3.125e9
latency = 20e-6
"""
KINDS = """\
[[hosts]]
count = 1
devices_per_host = 8
device = "v100-16gb"
[between]
bandwidth = 12.5e9
latency = 20e-6
"""


def blocks() -> Iterator[str]:
    """The TOML in the documentation of clusters and in the design of their files."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    yield from re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def merged(table: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = dict(table)
    for key, value in more.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) else value
    return both


def test_all_is_described() -> None:
    assert list(undescribed(SCHEMA)) == []


def test_documented_files() -> None:
    tables = [tomllib.loads(block) for block in blocks()]
    clusters = [table for table in tables if "arguments" not in table]
    whole = [table for table in clusters if "hosts" in table]
    assert len(whole) == 2
    parts = [merged(whole[0], table) for table in clusters if "hosts" not in table]
    assert len(parts) == 1
    for table in whole + parts:
        VALIDATOR.validate(table)


@pytest.mark.parametrize("name", [*PRESETS, *(f"{name},ideal" for name in IDEAL)])
def test_presets(name: str) -> None:
    preset, _, ideal = name.partition(",")
    machine = (IDEAL if ideal else PRESETS)[preset]
    found = Fit(machine=machine, residuals={"matrix f32": 0.1}, spread=0.01, programs={"wait": 1.0})
    text = calibrated_text(
        found, hosts=2, devices_per_host=8, about={"date": "now"}, comment="none"
    )
    VALIDATOR.validate(tomllib.loads(text))


def test_both_know_the_same_keys() -> None:
    defs = SCHEMA["$defs"]
    equal = defs["equal_hosts"]["properties"]
    kinds = defs["kinds_of_hosts"]["properties"]
    device = defs["device"]["properties"]
    sections = {
        (): defs["equal_hosts"],
        ("device",): defs["device"],
        ("device", "efficiency"): defs["efficiency"],
        ("device", "call"): device["call"],
        ("device", "step"): device["step"],
        ("intra_host",): equal["intra_host"],
        ("inter_host",): equal["inter_host"],
        ("intra_host", "transfer"): defs["transfer"],
        ("inter_host", "transfer"): defs["transfer"],
        ("between",): kinds["between"],
        ("between", "transfer"): defs["transfer"],
    }
    assert {*sections} == {*cluster_file._KEYS}
    for where, section in sections.items():
        needed, more = cluster_file._KEYS[where], cluster_file._MORE.get(where, ())
        assert {*section["required"]} == {*needed}, where
        assert {*section["properties"]} == {*needed, *more}, where
    assert {*kinds["hosts"]["items"]["properties"]} == {*cluster_file._HOSTS}
    assert {*defs["element_type"]["enum"]} == {*cluster_file._TYPES}


@pytest.mark.parametrize("text", [FILE, KINDS])
def test_both_accept(text: str, tmp_path: Path) -> None:
    VALIDATOR.validate(tomllib.loads(text))
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    parse_cluster(str(path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hosts = 2", "hosts = 0"),
        ("hosts = 2", "hosts = true"),
        ("hosts = 2", "hosts = 2\nzebra = 1"),
        ("hosts = 2\n", ""),
        ('name = "mine"', "name = 1"),
        ('"16GiB"', '"16 gigs"'),
        ('"16GiB"', "16"),
        ('"16GiB"', '"0GiB"'),
        ('"16GiB"', '"0.0 GiB"'),
        ("usable_memory = 0.9", "usable_memory = 1.1"),
        ("usable_memory = 0.9", "usable_memory = 2"),
        ("f16 = 125e12", "f33 = 125e12"),
        ("matrix = { f32", "matrix = { f33 = [[1e9, 0.75]], f32"),
        (", f32 = 15.7e12", ""),
        ("f16 = 125e12", "f16 = 0.0"),
        ("memory_bandwidth = 900e9", "memory_bandwith = 900e9"),
        ("start = 1e-4", "per_shard = 1e-4"),
        ("matrix = { f32", "matrix = { f16"),
        ("[[1e6, 0.6]", "[[1e6, 1.6]"),
        ("[[1e6, 0.6]", "[[0.5, 0.6]"),
        ("[[1e6, 0.6]", "[[1e6]"),
        ("[[1e6, 0.6]", "[[1e6, 0.6, 1]"),
        ("[[1e6, 0.6], [1e8, 0.9]]", "[]"),
        ("\noverlap = 0.5", "\noverlap = 1.0"),
        ("transfer_overlap = 0.25", "transfer_overlap = -0.1"),
        ("latency = 5e-6", "latency = -1"),
        ("all-reduce.8", "all-sum.8"),
        ("all-reduce.8", "all-reduce.1"),
        ("alpha = 31e-6, ", ""),
        ("[intra_host]", "[other]"),
        ("[inter_host]", "[[inter_host]]"),
    ],
)
def test_both_refuse(old: str, new: str, tmp_path: Path) -> None:
    assert old in FILE
    check_refused(FILE.replace(old, new, 1), tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count = 1", "count = 0"),
        ("count = 1", "number = 1"),
        (KINDS, "hosts = []"),
        ('"v100-16gb"', "3"),
        ("[between]", "[intra_host]"),
        ("latency = 20e-6", ""),
    ],
)
def test_both_refuse_kinds(old: str, new: str, tmp_path: Path) -> None:
    assert old in KINDS
    check_refused(KINDS.replace(old, new, 1), tmp_path)


def check_refused(text: str, folder: Path) -> None:
    path = folder / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError):
        parse_cluster(str(path))
    assert not VALIDATOR.is_valid(tomllib.loads(text))
