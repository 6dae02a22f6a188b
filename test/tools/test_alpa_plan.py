"""`alpa-plan`: files and zoo programs become plans, tables and numbers; errors are messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax import export
from jsonschema import Draft202012Validator

from alpa import runtime
from alpa.dialects import parse_file
from alpa.passes import run as run_passes
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.report import PlanReport
from alpa.runtime.planning import Settings
from alpa.tools import alpa_plan, zoo
from alpa.tools.alpa_plan import main
from alpa.tools.zoo import GPT_TINY
from alpa.tools.zoo.gpt import GPTConfig
from test.schemas import read_schema
from test.terminal import new_terminal

MINI = GPTConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    vocab_size=32,
    sequence_length=8,
    dtype=GPT_TINY.dtype,
    global_batch_size=4,
)
# A step without roles: w - xT (x w), as JAX names its arguments.
NAMED = """\
func.func public @main(%w: tensor<16x16xf32> loc("state['w']"), %x: tensor<8x16xf32> loc("x"))
    -> (tensor<16x16xf32> {jax.result_info = "result[0]"},
        tensor<8x16xf32> {jax.result_info = "result[1]"}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %2 = stablehlo.subtract %w, %1 : tensor<16x16xf32>
  return %2, %0 : tensor<16x16xf32>, tensor<8x16xf32>
}
"""
ROLES = """\
[arguments]
"state*" = "state"
x = "batch"
[results]
"result[0]" = "state:state['w']"
1 = "concat:0"
"""


@pytest.fixture(autouse=True)
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo.CONFIGS, "gpt-mini", MINI)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    path = tmp_path / "step.mlir"
    path.write_text(NAMED)
    return path


def test_planning_a_file_imports_no_jax(named: Path) -> None:
    """It takes longer to import than a small program takes to plan."""
    code = f"""
import sys
from alpa.tools.alpa_plan import main
main([{str(named)!r}, "--cluster", "v100-16gb:1x2"])
slow = {{"jax", "optax", "scipy", "bokeh", "alpa.runtime.report.content"}}
print("imported:", slow & sys.modules.keys())
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.endswith("imported: set()\n")


def test_a_plan_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "plan.json"
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    cache = ["--verify-cache", str(tmp_path / "cache")]
    assert main([*command, "--verify", *cache, "--json", str(numbers)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[-1].endswith("fits")
    plan = json.loads(numbers.read_text())
    Draft202012Validator(read_schema("alpa.passes.plan", "plan.schema.json")).validate(plan)
    verified = plan["verification"]
    assert verified["fits"]
    assert [it["name"] for it in verified["meshes"]] == ["mesh_0"]


def test_a_verified_plan_is_exported_with_its_executables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, stages, cache = (tmp_path / name for name in ("p.mlir", "stages", "cache"))
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--num-micro-batches", "2", "-o", output]
    command += ["--verify", "--export", stages, "--verify-cache", cache]
    command += ["--compiler-option", "xla_cpu_enable_fast_min_max=true"]
    assert main([*map(str, command)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    modules, files = set(stages.glob("*.mlir")), set((stages / "executables").iterdir())
    last = captured.out.splitlines()[-1]
    assert last.startswith(f"executables: {len(files)} files of {len(modules)} stages, ")
    assert last.endswith(f"in {stages / 'executables'}")
    # Each was compiled once, and kept.
    assert {path.name for path in cache.glob("*.xla")} == {path.name for path in files}
    options = {"xla_cpu_enable_fast_min_max": True}
    step = runtime.load(output, compiler_options=options, executables=stages / "executables")
    assert {stage.read_from for stage in step.stages.values()} == files


def test_without_a_compiler_modules_are_exported(
    small_cluster: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, stages = small_cluster(devices=2), tmp_path / "stages"
    command = ["zoo:gpt-mini", "--cluster", str(cluster), "--num-micro-batches", "2"]
    assert main([*command, "--export", str(stages)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("alpa-plan: no executables are exported: no description of")
    assert captured.out.splitlines()[-1].startswith("search: ")
    assert list(stages.glob("*.mlir"))
    assert not (stages / "executables").exists()


@pytest.mark.parametrize(
    ("memory", "status"), [pytest.param("98KiB", 0, marks=pytest.mark.slow), ("62KiB", 1)]
)
def test_a_plan_that_does_not_fit_is_repaired_or_refused(
    memory: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # XLA's CPU backend needs about 100 KiB where the plan says 60.
    program = ["zoo:gpt-mini", "--cluster", f"cpu:1x2,memory={memory}", "--num-micro-batches", "2"]
    command = [*program, "--verify-cache", str(tmp_path)]
    assert main([*command, "--verify"]) == 1
    assert "does not fit: " in capsys.readouterr().out.splitlines()[-1]
    assert main([*command, "--verify=repair"]) == status
    captured = capsys.readouterr()
    assert re.match(r"mesh_0 does not fit: .* KiB; planning again with .* per device", captured.err)
    if status == 0:
        assert captured.out.splitlines()[-1].endswith("fits")
    else:
        assert captured.out == ""
        assert "fits into memory" in captured.err


def test_a_zoo_program_becomes_a_plan_and_all_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, numbers, stages = (tmp_path / name for name in ("p.mlir", "p.json", "stages"))
    files = ["-o", output, "--json", numbers, "--export", stages, "--no-executables"]
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    assert main([*command, *map(str, files)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # only errors go there unless it is a terminal
    lines = captured.out.splitlines()
    assert lines[0].startswith("plan for cpu:1x2 (1 host x 2 CPU): ")
    assert "2 micro-batches" in lines[0]
    assert lines[-1].startswith("search: ")
    assert any(line.startswith("stage") and ": " in line for line in lines)

    module = parse_file(output)
    report = PlanReport.of(module)
    plan = json.loads(numbers.read_text())
    assert plan["num_micro_batches"] == report.num_micro_batches == 2
    assert plan["predicted_step_seconds"] == report.predicted_step_seconds
    assert plan["predicted_peak_bytes"] == list(report.predicted_peak_bytes)
    passes = {"simplify-trivial-ops", "layer-cluster", "stage-mesh-partition"}
    passes |= {"ilp-shard-annotate", "insert-cross-mesh-reshard"}
    assert passes | {"lower"} <= plan["phases"].keys()
    assert plan["search_seconds"] == pytest.approx(sum(plan["phases"].values()))
    assert plan["solver"]["status"] == "optimal"
    assert plan["solver"]["gap"] == pytest.approx(0.0, abs=0.02)

    fragments = read_planned(run_passes(str(module), "merge-fragments")).fragments
    assert {path.name for path in stages.glob("*.mlir")} == {f"{f.name}.mlir" for f in fragments}
    for path in stages.glob("*.mlir"):
        assert parse_file(path).operation.verify()


def test_auto_takes_the_best_number_of_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--intra", "data-parallel"]
    assert main([*command, "--batch-size", "3"]) == 0
    out = capsys.readouterr().out
    tried = out.partition("micro-batches tried\n")[2].splitlines()
    assert [line.split()[0] for line in tried[:2]] == ["1", "3"]
    (taken,) = (line for line in tried[:2] if line.endswith("(taken)"))
    number = int(taken.split()[0])
    assert f", {number} micro-batch{'es' if number > 1 else ''}, " in out.splitlines()[0]


@pytest.mark.parametrize("inter", ["none", "equal-ops"])
def test_baselines_between_meshes(
    inter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    assert main([*command, "--inter", inter, "--intra", "zero2", "--json", str(path)]) == 0
    plan = json.loads(path.read_text())
    assert {mesh["intra"] for mesh in plan["solver"]["meshes"]} == {"zero2"}
    if inter == "none":
        assert len(plan["stages"]) == 1
    capsys.readouterr()


def test_a_manual_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(zoo.CONFIGS, "gpt-two", replace(MINI, num_layers=2))
    path = tmp_path / "plan.json"
    command = ["zoo:gpt-two", "--cluster", "cpu:1x4", "--num-micro-batches", "2"]
    command += ["--inter", "equal-layers", "--intra", "megatron", "--mesh-shape", "1x2"]
    assert main([*command, "--json", str(path)]) == 0
    plan = json.loads(path.read_text())
    assert [mesh["logical_shape"] for mesh in plan["meshes"]] == [[1, 2], [1, 2]]
    capsys.readouterr()


def test_numbers_of_stages_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, forward = tmp_path / "plan.json", tmp_path / "forward.mlir"
    forward.write_text("""\
func.func public @main(%x: tensor<8x16xf32>, %w: tensor<16x16xf32>) -> tensor<8x16xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}
""")
    command = [str(forward), "--cluster", "cpu:2x1", "--json", str(numbers)]
    assert main([*command, "--num-stages", "1", "--num-layers", "2"]) == 0
    (stage,) = json.loads(numbers.read_text())["stages"]
    assert stage["layers"] == ["layer_0", "layer_1"]
    assert main([*command, "--no-meshes-over-hosts"]) == 0
    assert len(json.loads(numbers.read_text())["stages"]) == 2
    assert "every mesh over several hosts is left out of the search" in capsys.readouterr().err
    assert main([*command, "--num-stages", "2", "--inter", "none"]) == 1
    assert "error: inter=none plans one stage, and num_stages is 2;" in capsys.readouterr().err


def test_a_file_has_one_micro_batch(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(named), "--cluster", "cpu:1x2"]) == 0
    captured = capsys.readouterr()
    assert ", 1 micro-batch, 1f1b, " in captured.out.splitlines()[0]
    assert "one micro-batch: stages take turns" in captured.out
    assert "micro-batches tried" not in captured.out


def test_roles_from_a_file(named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(named), "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    assert main([*command, "--micro-batches", "independent"]) == 1
    assert f"{named}:1:" in capsys.readouterr().err
    roles = tmp_path / "roles.toml"
    roles.write_text(ROLES)
    assert main([*command, "--roles", str(roles)]) == 0
    assert "  batch: 1 argument (1)\n" in capsys.readouterr().out
    roles.write_text('[arguments]\n\n"y" = "batch"\n')
    assert main([*command, "--roles", str(roles)]) == 1
    assert capsys.readouterr().err.startswith(f"{roles}:3: error: no argument is called y; ")


# As NAMED, in the form of XLA's dumps: elements of tuples are numbered like other arguments.
TUPLES = """\
func.func public @main(
    %t: tuple<tensor<16x16xf32>, tuple<tensor<8x16xf32>>> loc("step"), %s: tensor<f32> loc("s"))
    -> tuple<tensor<16x16xf32>, tensor<8x16xf32>> {
  %w = stablehlo.get_tuple_element %t[0]
    : (tuple<tensor<16x16xf32>, tuple<tensor<8x16xf32>>>) -> tensor<16x16xf32>
  %i = stablehlo.get_tuple_element %t[1]
    : (tuple<tensor<16x16xf32>, tuple<tensor<8x16xf32>>>) -> tuple<tensor<8x16xf32>>
  %x = stablehlo.get_tuple_element %i[0] : (tuple<tensor<8x16xf32>>) -> tensor<8x16xf32>
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %2 = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<16x16xf32>
  %3 = stablehlo.multiply %1, %2 : tensor<16x16xf32>
  %4 = stablehlo.subtract %w, %3 : tensor<16x16xf32>
  %r = stablehlo.tuple %4, %0 : tuple<tensor<16x16xf32>, tensor<8x16xf32>>
  return %r : tuple<tensor<16x16xf32>, tensor<8x16xf32>>
}
"""
ROLES_IN_TUPLES = """\
[arguments]
"step[0]" = "state"
1 = "batch"
2 = "constant"
[results]
0 = "state:step[0]"
1 = "concat:0"
"""


def test_roles_of_elements_of_tuples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, roles = tmp_path / "tuples.mlir", tmp_path / "roles.toml"
    program.write_text(TUPLES)
    roles.write_text(ROLES_IN_TUPLES)
    command = [str(program), "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    assert main([*command, "--roles", str(roles), "--compare-with-jax"]) == 0
    out = capsys.readouterr().out
    assert "  batch: 1 argument (1)\n" in out
    assert "2 of 2 results are equal" in out
    roles.write_text('[arguments]\n"step[1]" = "batch"\n')
    assert main([*command, "--roles", str(roles)]) == 1
    message = f"{roles}:2: error: no argument is called step[1]; there are step[0], step[1][0]"
    assert message in capsys.readouterr().err


def test_one_layer_on_one_device(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(named), "--cluster", "cpu:1x1", "--num-micro-batches", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 stage, 1 micro-batch" in out
    assert "stage 0: one device\n" in out


def test_more_devices_than_are_of_use(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(named), "--cluster", "h100:8x8"]) == 0
    assert "whose devices repeat one another's work" in capsys.readouterr().out


def test_memory_that_cannot_be_enough(
    named: Path, small_cluster: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = small_cluster("256B", devices=2)
    assert main([str(named), "--cluster", str(cluster)]) == 1
    err = capsys.readouterr().err
    assert re.match(rf"{named}:\d+:\d+: error: no cut of 1 layers fits into memory", err)
    tried = "In the shardings that were tried, layer_0 alone holds at least 1 KiB on each of 2"
    assert f"{tried} device(s); small has 256 B" in err
    assert main(["zoo:gpt-mini", "--cluster", str(cluster)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "zoo:gpt-mini: error: no number of micro-batches can be planned (tried 1, 2, 4); with 4, "
        "the smallest micro-batches: "
    )
    assert "fits into memory" in err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("f32 = ", "f16 = ", "{file}:6: error: peak_flops lacks 'f32'"),
        ("hosts = 1", "hosts = = 1", "{file}:1:9: error: not valid TOML: "),
        ("devices_per_host = 2", "devices_per_host = [2, 4]", "{file}:2: error: devices_per_host "),
        ("[device]", "[[device]]", "{file}:3: error: device is a list of 1: hosts, their devices "),
    ],
)
def test_clusters_that_cannot_be_planned_for(
    old: str,
    new: str,
    message: str,
    named: Path,
    small_cluster: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = small_cluster("1GiB", devices=2)
    text = cluster.read_text()
    assert old in text
    cluster.write_text(text.replace(old, new, 1))
    assert main([str(named), "--cluster", str(cluster)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message.format(file=cluster, step=named))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("{file} --cluster no-such:1x2", "alpa-plan: error: unknown cluster 'no-such'"),
        ("{file} --cluster cpu:2", "alpa-plan: error: cluster 'cpu:2': '2' is not a shape"),
        ("{file} --cluster cpu:1x0", "alpa-plan: error: cluster 'cpu:1x0': "),
        (
            "{file} --cluster none.toml",
            "alpa-plan: error: cannot read the cluster file 'none.toml'",
        ),
        ("none.mlir --cluster cpu:1x1", "none.mlir: error: No such file or directory"),
        ("{broken} --cluster cpu:1x1", "{broken}:1:16: error: expected"),
        ("{empty} --cluster cpu:1x1", "{empty}: error: empty module: it holds no function to plan"),
        ("{empty} --cluster cpu:1x1 --force 0=[-]", "{empty}: error: empty module: it holds no"),
        ("train.py --cluster cpu:1x1", "train.py: error: a Python file; write its program,"),
        ("{dynamic} --cluster cpu:1x1", "{dynamic}:1:17: error: dimension 0 of argument 0"),
        ("zoo:gpt-mni --cluster cpu:1x1", "alpa-plan: error: no program is called 'gpt-mni'; try"),
        (
            "zoo:gpt-mini --cluster cpu:1x1 --num-micro-batches 3",
            "alpa-plan: error: a batch of 4 samples cannot be cut into 3 equal micro-batches, "
            "but into 1, 2 or 4",
        ),
        (
            "{file} --cluster cpu:1x1 --num-micro-batches auto",
            "alpa-plan: error: --num-micro-batches auto lowers the program for each number",
        ),
        (
            "{file} --cluster cpu:1x1 --schedule {table}",
            "alpa-plan: error: {table}:1:5: 0F0 is listed twice",
        ),
        (
            "{file} --cluster cpu:1x1 --schedule zbv",
            'alpa-plan: error: "zbv" is neither the name of a schedule, gpipe, 1f1b',
        ),
        ("{file} --cluster cpu:1x1 --batch-size 4", "alpa-plan: error: --batch-size is for zoo"),
        ("{file} --cluster cpu:1x1 --roles none.toml", "none.toml: error: No such file"),
        (
            "zoo:gpt-mini --cluster cpu:1x1 --roles {roles}",
            "alpa-plan: error: --roles is for files",
        ),
        (
            "zoo:gpt-mini --cluster cpu:1x1 --num-micro-batches 1 --objective throughput",
            "zoo:gpt-mini: error: no number of micro-batches can be planned (tried 1); with 1, the "
            "smallest micro-batches: objective=throughput is for programs of forwards only",
        ),
        ("{file} --cluster cpu:1x1 -o /none/p.mlir", "alpa-plan: error: cannot write /none/p.mlir"),
        ("{file} --cluster cpu:1x1 -o /dev/full", "alpa-plan: error: cannot write /dev/full: No "),
        ("{file} --cluster cpu:1x1 --json /", "alpa-plan: error: cannot write /: it is a folder"),
        (
            "{file} --cluster /dev/zero",
            "alpa-plan: error: cannot read the cluster file '/dev/zero': it does not end within 16 "
            "MiB",
        ),
        (
            "{file} --cluster cpu:1x1 --roles /dev/zero",
            "/dev/zero: error: it does not end within 16 MiB",
        ),
        (
            "{file} --cluster cpu:1x1 --export /none --no-executables --compiler-option xla_a=1",
            "alpa-plan: error: --compiler-option is for stages that --verify or --export compiles",
        ),
        (
            "{file} --cluster v100-16gb:1x1 --verify --compiler-option xla_gpu_shard_autotuning=1",
            "alpa-plan: error: compiler_options has xla_gpu_shard_autotuning=1, but only one ",
        ),
        (
            "{file} --cluster cpu:1x1 --no-executables",
            "alpa-plan: error: --no-executables is for --export; add it, or remove",
        ),
        (
            "zoo:gpt-mini --cluster cpu:1x1 --refine b=8",
            "alpa-plan: error: --refine is for files; zoo:gpt-mini has no symbolic dimensions",
        ),
        (
            "{file} --cluster cpu:1x1 --refine b=8",
            "{file}:1:1: error: the program has no symbolic dimension: all sizes are given",
        ),
        (
            "{file} --cluster cpu:1x1 --export-format vhlo",
            "alpa-plan: error: --export-format is for --export; add it, or remove --export-format",
        ),
        (
            "{file} --cluster cpu:1x1 --strip-sdy",
            "alpa-plan: error: --strip-sdy is for --export; add it, or remove --strip-sdy",
        ),
        (
            "{file} --cluster cpu:1x1 --export {file}",
            "alpa-plan: error: cannot write into {file}: it is not a folder",
        ),
    ],
)
def test_errors(
    command: str, message: str, named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "broken": "func.func @main(",
        "empty": "",
        "dynamic": "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {\n"
        "  return %x : tensor<?xf32>\n}\n",
        "roles": ROLES,
        "table": "0F0,0F0",
    }
    paths = {"file": named} | {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        paths[name].write_text(text)
    assert main(command.format(**paths).split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message.format(**paths))


def test_a_file_of_jax_export_is_planned_at_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b, c = export.symbolic_shape("b, c")
    shapes = (c, c), (b, c)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    path = tmp_path / "step.bin"
    product = export.export(jax.jit(lambda w, x: x @ w))(*arguments)
    path.write_bytes(product.mlir_module_serialized)
    planned = tmp_path / "planned.mlir"
    command = [str(path), "--cluster", "cpu:1x2", "-o", str(planned)]
    assert main([*command, "--refine", "b=8", "--refine", "c=16"]) == 0
    assert "tensor<8x16xf32>" in planned.read_text()
    capsys.readouterr()
    assert main([*command, "--refine", "b=8"]) == 1
    assert "'c' has no size; give it one: c=SIZE" in capsys.readouterr().err


def test_all_new_outputs_are_written_or_none(named: Path, tmp_path: Path) -> None:
    planned, numbers = tmp_path / "planned.mlir", tmp_path / "numbers.json"
    command = [str(named), "--cluster", "cpu:1x1"]
    assert main([*command, "-o", str(planned), "--json", "/dev/full"]) == 1
    assert not planned.exists()
    assert main([*command, "-o", str(planned)]) == 0
    assert planned.exists()
    numbers.write_text("of an earlier run")
    assert main([*command, "-o", "/dev/full", "--json", str(numbers)]) == 1
    assert numbers.read_text() == "of an earlier run"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["step.mlir"], ["step.mlir", "--cluster", "cpu:1x1", "--num-micro-batches", "0"]],
)
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    captured = capsys.readouterr()
    if words == ["--help"]:
        assert end.value.code == 0
        assert "alpa-plan zoo:gpt-2.6b --cluster v100-16gb:8x8" in captured.out
    else:
        assert end.value.code == 1
        assert "alpa-plan: error: " in captured.err


def test_a_terminal_sees_the_phase(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    assert main([str(named), "--cluster", "cpu:1x2"]) == 0
    passes = {"simplify-trivial-ops", "layer-cluster", "ilp-shard-annotate"}
    assert passes <= {line.partition(":")[0] for line in terminal.shown}
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is gone at the end


@pytest.mark.parametrize(
    "command",
    ["alpa.tools.zoo --list", "alpa.tools.alpa_plan {file} --cluster cpu:1x1"],
)
def test_a_reader_that_goes_ends_it_quietly(command: str, named: Path) -> None:
    words = command.format(file=named).split()
    with subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


def test_plan_of_a_zoo_program_is_compared_with_plain_jax(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["zoo:gpt-mini", "--cluster", "cpu:1x2", "--num-micro-batches", "2"]
    assert main([*command, "--compare-with-jax"]) == 0
    table, _, comparison = capsys.readouterr().out.partition("\nsearch: ")
    assert table.startswith("plan for cpu:1x2")
    assert "max|a-b|" in comparison
    assert "results are equal to plain JAX on one device" in comparison
    assert "FAULT" not in comparison


def test_plan_of_a_file_is_compared_with_plain_jax(
    named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text(ROLES)
    command = [str(named), "--cluster", "cpu:1x2", "--roles", str(roles), "--compare-with-jax"]
    assert main([*command, "--num-micro-batches", "2"]) == 0
    assert "\n2 of 2 results are equal to XLA on one device" in capsys.readouterr().out
    assert main([*command, "--shrink", "16=4"]) == 0
    shown = capsys.readouterr().out
    assert "tensor<4x4xf32>" in shown
    assert "tensor<8x4xf32>" in shown
    assert main([*command, "--shrink", "17=4"]) == 1
    assert "the plan cannot be compared: no dimension has size 17" in capsys.readouterr().err


@pytest.mark.parametrize("intra", ["auto", "data-parallel", "zero3"])
def test_tensors_without_elements_have_no_shards(
    intra: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """XLA replicates them, so JAX cannot read shards of them."""
    file = tmp_path / "empty.mlir"
    file.write_text("""
        func.func @main(%x: tensor<0x64xf32>, %w: tensor<64x64xf32>, %y: tensor<8x64xf32>)
            -> (tensor<0x64xf32>, tensor<8x64xf32>, tensor<0x64xf32>) {
          %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
               : (tensor<0x64xf32>, tensor<64x64xf32>) -> tensor<0x64xf32>
          %1 = stablehlo.dot_general %y, %w, contracting_dims = [1] x [0]
               : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
          %2 = stablehlo.exponential %x : tensor<0x64xf32>
          return %0, %1, %2 : tensor<0x64xf32>, tensor<8x64xf32>, tensor<0x64xf32>
        }""")
    command = [str(file), "--cluster", "cpu:1x4", "--intra", intra, "--compare-with-jax"]
    assert main(command) == 0
    assert "\n3 of 3 results are equal to XLA on one device" in capsys.readouterr().out


def test_plan_that_computes_something_else_has_exit_status_1(
    named: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan in the folder is another program's."""
    other = named.with_name("other.mlir")
    other.write_text(NAMED.replace("stablehlo.subtract", "stablehlo.add"))
    whole = alpa_plan.plan

    def another(module: object, settings: Settings, clock: Clock, *, keep: bool) -> object:
        return whole(parse_file(other), settings, clock, keep=keep)

    monkeypatch.setattr(alpa_plan, "plan", another)
    assert main([str(named), "--cluster", "cpu:1x2", "--compare-with-jax"]) == 1
    assert "FAULT: 1 differ" in capsys.readouterr().out


def test_what_xla_cannot_compile_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    type_ = "tensor<8x4xf32>"
    file = tmp_path / "unknown.mlir"
    file.write_text(
        f"func.func public @main(%x: {type_}) -> {type_} {{\n"
        f"  %0 = stablehlo.custom_call @no_such_call(%x) : ({type_}) -> {type_}\n"
        f"  return %0 : {type_}\n}}\n"
    )
    assert main([str(file), "--cluster", "cpu:1x2", "--compare-with-jax"]) == 1
    shown = capsys.readouterr().err
    assert "alpa-plan: error: the plan cannot be compared: XLA cannot compile or run it" in shown
    assert "custom call to no_such_call" in shown
    assert "; while compiling @mesh_0." in shown


def test_shrinking_needs_a_comparison(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(named), "--cluster", "cpu:1x2", "--shrink", "16=4"]) == 1
    assert "--shrink is for --compare-with-jax" in capsys.readouterr().err


def test_a_size_shrinks_to_one_other(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shrink", "16=8", "--shrink", "8=4", "--shrink", "16=4"]
    assert main([str(named), "--cluster", "cpu:1x2", "--compare-with-jax", *sizes]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "alpa-plan: error: --shrink replaces 16 by 8 and by 4; leave one of them out\n"
    )
    assert not captured.out


@pytest.mark.parametrize(
    ("first", "second"), [("-o", "--save-hints"), ("--json", "-o"), ("--report", "--json")]
)
def test_each_output_has_a_file_of_its_own(
    first: str, second: str, named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "out", tmp_path / "." / ".." / tmp_path.name / "out"
    files = [first, str(one), second, str(other)]
    assert main([str(named), "--cluster", "cpu:1x1", *files]) == 1
    error = capsys.readouterr().err
    assert error.startswith("alpa-plan: error: cannot write ")
    assert {first, second} <= {*error.replace(";", "").split()}
    assert error.endswith("; give each a file of its own\n")
    assert not one.exists()


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("-o", "step.mlir", "cannot write -o to {file}: it is the program; name another file"),
        ("--json", "-", "cannot write --json to standard output, which has the plan's table"),
    ],
)
def test_an_output_is_a_file_of_its_own(
    option: str,
    file: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("step.mlir").write_text(NAMED)
    assert main(["./step.mlir", "--cluster", "cpu:1x1", option, file]) == 1
    assert f"alpa-plan: error: {message.format(file=file)}" in capsys.readouterr().err
    assert Path("step.mlir").read_text() == NAMED
    assert not Path("-").exists()


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_pipe_is_read_once_for_all_plans(name: str) -> None:
    command = [sys.executable, "-m", "alpa.tools.alpa_plan", name, "--cluster", "cpu:1x2"]
    done = subprocess.run(
        [*command, "--force", "x = [-, axis0]"],
        input=NAMED,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "difference" in done.stdout
    done = subprocess.run(command, input="step", capture_output=True, text=True, check=False)
    name = "<stdin>" if name == "-" else name
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name}:1:1: error: ")
