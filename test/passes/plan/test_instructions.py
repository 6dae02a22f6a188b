"""Instructions of random programs, compared with their micro-batches one after the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa import passes
from alpa.dialects import parse
from alpa.dialects.attributes import Argument, Part, Result, ResultRole, Role
from alpa.dialects.plan import Plan, Schedule
from alpa.passes.plan.data import (
    DeviceMesh,
    Fragment,
    Program,
    ProgramArgument,
    ProgramResult,
    Transfer,
    Value,
)
from alpa.passes.plan.instructions import Add, Move, Run, Script, write_script
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.step_time import simulate
from alpa.passes.plan.versions import Key
from alpa.passes.schedules.planned import in_flight
from alpa.runtime.script_checks import ScriptError, verify
from alpa.tools import zoo

MODULUS = (1 << 61) - 1


@dataclass
class Builder:
    """A program, value by value; a value on another mesh is one transfer."""

    values: list[Value] = field(default_factory=list)
    steps: list[Fragment | Transfer] = field(default_factory=list)
    arguments: list[ProgramArgument] = field(default_factory=list)
    results: list[ProgramResult] = field(default_factory=list)
    moved: dict[tuple[int, str], int] = field(default_factory=dict)

    def value(self, mesh: str) -> int:
        self.values.append(Value(mesh=mesh, shape=(2,), dtype="f32"))
        return len(self.values) - 1

    def argument(self, mesh: str, role: Role, number: int) -> int:
        attributes = Argument(role=role, batch_dim=0 if role == "batch" else None)
        value = self.value(mesh)
        self.arguments.append(ProgramArgument(value=value, number=number, attributes=attributes))
        return value

    def at(self, value: int, mesh: str) -> int:
        if self.values[value].mesh == mesh:
            return value
        if (value, mesh) not in self.moved:
            self.moved[value, mesh] = target = self.value(mesh)
            self.steps.append(Transfer(source=value, target=target))
        return self.moved[value, mesh]

    def fragment(self, mesh: str, part: Part, inputs: list[int], count: int) -> list[int]:
        inputs = list(dict.fromkeys(self.at(value, mesh) for value in inputs))
        outputs = [self.value(mesh) for _ in range(count)]
        self.steps.append(
            Fragment(
                name=f"{mesh}.{part}.{len(self.steps)}",
                mesh=mesh,
                part=part,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
            )
        )
        return outputs

    def result(self, value: int, role: str) -> None:
        self.results.append(
            ProgramResult(
                value=value,
                number=len(self.results),
                attributes=Result(role=ResultRole.parse(role)),
            )
        )

    def program(self, plan: Plan) -> Program:
        names = sorted({value.mesh for value in self.values})
        return Program(
            values=tuple(self.values),
            arguments=tuple(self.arguments),
            results=tuple(self.results),
            steps=tuple(self.steps),
            meshes=tuple(
                DeviceMesh(name=name, hosts=(0,), devices=(s,), axes=(("a", 1),))
                for s, name in enumerate(names)
            ),
            plan=plan,
        )


def random_program(seed: int, schedule: Schedule, batches: int) -> Program:
    """Stages that read one another's values over any distance.

    States are tied or carried, updates wait for one another, and some stages have no backward.
    """
    rng, builder = random.Random(seed), Builder()
    count = rng.randint(1, 4)
    meshes = [f"mesh_{s}" for s in range(count)]

    def some(them: list[int]) -> list[int]:
        return [value for value in them if rng.random() < 0.3]

    weights = [builder.argument(mesh, "state", s) for s, mesh in enumerate(meshes)]
    batch = [builder.argument(rng.choice(meshes), "batch", 10 + n) for n in range(2)]
    constant = builder.argument(rng.choice(meshes), "constant", 20)
    # One or two copies of a state that a forward writes.
    where = rng.sample(meshes, min(count, rng.randint(1, 2)))
    carried = [builder.argument(mesh, "state", 30) for mesh in where]
    forward: list[list[int]] = []
    for s, mesh in enumerate(meshes):
        earlier = [value for outputs in forward for value in outputs]
        inputs = [weights[s], *some([*batch, constant, *earlier, *weights[:s]])]
        inputs += [value for m, value in zip(where, carried, strict=True) if m == mesh]
        inputs += forward[-1][:1] if forward else []
        forward.append(builder.fragment(mesh, "forward", inputs, rng.randint(2, 4)))
    made = [value for outputs in forward for value in outputs]
    gradients: dict[int, int] = {}
    backward: list[int] = []
    if rng.random() < 0.8:
        last: list[int] = []
        for s in reversed(range(count)):
            if rng.random() < 0.2:
                continue
            inputs = [weights[s], *some([*made, *batch, constant]), *last[:1], *some(backward)]
            last = builder.fragment(meshes[s], "backward", [*inputs, *forward[s][:1]], 3)
            gradients[s], backward = last[1], [*backward, *last]
    new: list[int] = []
    for s in gradients:
        # Levels: an update may read what another has made, and a gradient or loss of any stage.
        inputs = [weights[s], gradients[s], *some([*gradients.values(), *new, *made])]
        new += builder.fragment(meshes[s], "update", inputs, 1)
        builder.result(new[-1], f"state:{s}")
    state = rng.choice(forward[rng.randrange(count)][1:])
    for mesh in where:
        builder.result(builder.at(state, mesh), "state:30")
    for value in some([*made, *backward, *batch, constant, *builder.moved.values()]):
        builder.result(value, rng.choice(["mean", "sum", "last", "concat:0"]))
    return builder.program(Plan(num_micro_batches=batches, schedule=schedule))


def product(fragment: Fragment, number: int, inputs: list[int]) -> int:
    """A fragment's results: any function of all its inputs will do."""
    return hash((fragment.name, number, *inputs)) % MODULUS


def argument_of(program: Program, argument: ProgramArgument, m: int | None) -> int:
    batch = argument.attributes.role == "batch"
    return hash(("argument", argument.number, m if batch else None)) % MODULUS


def run_in_turn(program: Program) -> list[object]:
    """The results of micro-batches that run one after the other."""
    batches = program.num_micro_batches
    states = {a.value: argument_of(program, a, None) for a in program.arguments}
    each: list[dict[int, int]] = []
    for m in range(batches):
        env = {
            a.value: argument_of(program, a, m) if a.attributes.role == "batch" else states[a.value]
            for a in program.arguments
        }
        each.append(env)
        for step in program.steps:
            if isinstance(step, Transfer):
                if step.source in env:
                    env[step.target] = env[step.source]
            elif step.part != "update":
                inputs = [env[value] for value in step.inputs]
                env.update({v: product(step, i, inputs) for i, v in enumerate(step.outputs)})
        states.update({old: env[new] for old, new in program.carries.items()})
    total = {v: sum(env[v] for env in each) % MODULUS for v in each[0]}
    final = {v: total[v] if v in program.totals else it for v, it in each[-1].items()}
    for step in program.steps:
        if isinstance(step, Transfer) and step.source in final and step.target not in final:
            final[step.target] = final[step.source]
        elif isinstance(step, Fragment) and step.part == "update":
            inputs = [final[value] for value in step.inputs]
            final.update({v: product(step, i, inputs) for i, v in enumerate(step.outputs)})
    results: list[object] = []
    for result in program.results:
        role, value = result.attributes.role, result.value
        assert role is not None
        if value not in total or batches == 1 or value not in program.varying:
            results.append(final[value])
        elif role.kind == "concat":
            results.append([env[value] for env in each])
        elif role.kind in ("mean", "sum"):
            results.append(total[value])
        else:
            results.append(each[-1][value])
    return results


def run_script(script: Script) -> list[object]:
    program = script.program
    store: dict[Key, int] = {}
    by_value = {argument.value: argument for argument in program.arguments}
    for value, m in script.given:
        store[value, m] = argument_of(program, by_value[value], m)
    for it in script.instructions:
        if isinstance(it, Run):
            inputs = [store[key] for key in it.inputs]
            outputs = [product(it.fragment, i, inputs) for i in range(len(it.fragment.outputs))]
            numbers = {value: i for i, value in enumerate(it.fragment.outputs)}
            for key in it.outputs:
                before = store.get(key, 0) if key in it.accumulators else 0
                store[key] = (before + outputs[numbers[key[0]]]) % MODULUS
        elif isinstance(it, Move):
            store[it.target] = store[it.source]
        else:
            assert isinstance(it, Add)
            store[it.total] = (store.get(it.total, 0) + store[it.source]) % MODULUS
        for key in it.free:
            del store[key]
    return [
        [store[key] for key in output.keys] if output.concat is not None else store[output.keys[0]]
        for output in script.outputs
    ]


@settings(max_examples=300)
@given(st.integers(0, 1 << 32), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 5))
def test_scripts_compute_what_the_micro_batches_do_in_turn(
    seed: int, schedule: Schedule, batches: int
) -> None:
    program = random_program(seed, schedule, batches)
    script = write_script(program)
    assert run_script(script) == run_in_turn(program)
    memory = verify(script)
    # A later stage's value may wait for the first stage's backward; a carried state outlives its
    # micro-batch by one.
    most = in_flight(schedule, batches, len(program.meshes)) + 1
    assert all(kept <= most for kept in memory.in_flight.values())
    assert all(peak > 0 for peak in memory.peak_bytes.values())


@cache
def planned_zoo(family: str, num_stages: int) -> Program:
    """Layers and stages only, because instructions do not depend on shardings."""
    pipeline = (
        "simplify-trivial-ops,layer-cluster{num-layers=4},stage-mesh-partition"
        f"{{cluster=cpu:2x4 num-stages={num_stages} num-micro-batches=6}}"
    )
    text = zoo.get(f"{family}-tiny", optimizer="sgd").lower(2)
    return read_planned(parse(str(passes.run(text, pipeline))))


def with_schedule(program: Program, schedule: Schedule) -> Program:
    return replace(program, plan=replace(program.plan, schedule=schedule))


@pytest.mark.parametrize(
    "family",
    [
        "gpt",
        pytest.param("unet", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_planned_pipelines_keep_what_the_schedule_says(family: str, schedule: Schedule) -> None:
    program = with_schedule(planned_zoo(family, 4), schedule)
    kept = [in_flight(schedule, 6, s) for s in (4, 3, 2, 1)]
    assert list(verify(write_script(program)).in_flight.values()) == kept


def chain(schedule: Schedule = "1f1b") -> Script:
    """Two stages, three micro-batches."""
    builder = Builder()
    x = builder.argument("mesh_0", "batch", 0)
    weights = [builder.argument(f"mesh_{s}", "state", s) for s in range(2)]
    h, kept = builder.fragment("mesh_0", "forward", [weights[0], x], 2)
    (y,) = builder.fragment("mesh_1", "forward", [weights[1], h], 1)
    dw, dh = builder.fragment("mesh_1", "backward", [weights[1], y], 2)
    (dv,) = builder.fragment("mesh_0", "backward", [weights[0], kept, dh], 1)
    for s, gradient in enumerate((dv, dw)):
        (new,) = builder.fragment(f"mesh_{s}", "update", [weights[s], gradient], 1)
        builder.result(new, f"state:{s}")
    return write_script(builder.program(Plan(num_micro_batches=3, schedule=schedule)))


def words(script: Script, mesh: str) -> str:
    """`F0 >0 <1 B1 U`: runs, sends, receives with their micro-batches."""
    text: list[str] = []
    for it in script.on(mesh):
        if isinstance(it, Run):
            numbers = [m for _, m in (*it.inputs, *it.outputs) if m is not None]
            text.append(it.fragment.part[0].upper() + (str(numbers[0]) if numbers else ""))
        elif isinstance(it, Move):
            here = script.program.values[it.source[0]].mesh == mesh
            text.append(f"{'>' if here else '<'}{it.source[1]}")
    return " ".join(text)


def test_the_lists_of_a_chain() -> None:
    gpipe, alternating = chain("gpipe"), chain("1f1b")
    assert words(gpipe, "mesh_0") == "F0 >0 F1 >1 F2 >2 <0 B0 <1 B1 <2 B2 U"
    assert words(gpipe, "mesh_1") == "<0 F0 <1 F1 <2 F2 B0 >0 B1 >1 B2 >2 U"
    assert words(alternating, "mesh_0") == "F0 >0 F1 <0 >1 B0 F2 <1 >2 B1 <2 B2 U"
    assert words(alternating, "mesh_1") == "<0 F0 B0 >0 <1 F1 B1 >1 <2 F2 B2 >2 U"
    assert verify(gpipe).in_flight == {"mesh_0": 3, "mesh_1": 3}
    assert verify(alternating).in_flight == {"mesh_0": 2, "mesh_1": 1}
    # Of 8 bytes each: weight, what is kept, and dh, dw while the backward reads h1 no more.
    assert verify(gpipe).peak_bytes["mesh_1"] == 8 * (1 + 3 + 2)
    assert verify(alternating).peak_bytes["mesh_1"] == 8 * (1 + 1 + 2)


def timed(program: Program) -> Program:
    """Backwards take two seconds, everything else one."""
    steps = (
        replace(
            step, seconds=2.0 if isinstance(step, Fragment) and step.part == "backward" else 1.0
        )
        for step in program.steps
    )
    return replace(program, steps=tuple(steps))


def chart(program: Program) -> list[str]:
    """A line for each mesh, with a column for each second.

    Digits are the micro-batches of forwards, letters those of backwards (`a` is micro-batch 0), `U`
    is an update, `<` a receive, and `.` is idle.
    """
    events = simulate(write_script(program))
    rows = {mesh.name: ["."] * round(max(e.end for e in events)) for mesh in program.meshes}
    for event in events:
        letter, it = "<", event.instruction
        if isinstance(it, Run):
            m = next((m for _, m in (*it.inputs, *it.outputs) if m is not None), 0)
            letter = {"forward": "012", "backward": "abc", "update": "UUU"}[it.fragment.part][m]
        start, end = round(event.start), round(event.end)
        rows[event.mesh][start:end] = letter * (end - start)
    return [f"{mesh} {''.join(row)}" for mesh, row in rows.items()]


def test_the_chart_of_a_chain() -> None:
    assert chart(timed(chain("gpipe").program)) == [
        "mesh_0 012......<aa<bb<ccU",
        "mesh_1 .<0<1<2aabbccU.....",
    ]
    assert chart(timed(chain("1f1b").program)) == [
        "mesh_0 01...<aa2<bb.<ccU",
        "mesh_1 .<0aa<1bb<2ccU...",
    ]


def test_a_value_that_skips_a_stage_is_received_while_its_reader_waits() -> None:
    builder = Builder()
    x = builder.argument("mesh_0", "batch", 0)
    h, skip = builder.fragment("mesh_0", "forward", [x], 2)
    (y,) = builder.fragment("mesh_1", "forward", [h], 1)
    builder.fragment("mesh_2", "forward", [skip, y], 1)
    program = timed(builder.program(Plan(num_micro_batches=2)))
    assert chart(program) == [
        "mesh_0 01......",
        "mesh_1 .<0<1...",
        "mesh_2 .<.<0<<1",
    ]


def test_a_wrong_list_is_refused() -> None:
    script = chain("1f1b")
    lists = {name: list(script.on(name)) for name in ("mesh_0", "mesh_1")}

    def refused(change: Callable[[list], object], message: str, mesh: str = "mesh_0") -> None:
        damaged = {name: list(them) for name, them in lists.items()}
        change(damaged[mesh])
        with pytest.raises(ScriptError, match=message):
            verify(script, damaged)

    def swap(a: int, b: int) -> Callable[[list], object]:
        def change(them: list) -> None:
            them[a], them[b] = them[b], them[a]

        return change

    def no_free(number: int) -> Callable[[list], object]:
        def change(them: list) -> None:
            them[number] = replace(them[number], free=())

        return change

    # F0 >0 F1 <0 >1 B0 F2 …: to send 1 before receiving 0 waits for a mesh that sends 0
    refused(swap(3, 4), "wait for one another: mesh_0 at the move of value .* of micro-batch 1")
    refused(lambda them: them.insert(0, them.pop(5)), "micro-batch 0 is read and never made")
    refused(lambda them: them.insert(1, them[0]), "is made twice|after it is freed")
    refused(no_free(5), "mesh_0: value .* is left")
    refused(lambda them: them.append(them[-1]), "is read after it is freed")
    refused(lambda them: them.pop(), "wait|never made", mesh="mesh_1")
    again = replace(lists["mesh_0"][-1], free=(*lists["mesh_0"][-1].free, *lists["mesh_0"][5].free))
    refused(lambda them: them.__setitem__(-1, again), "is freed and not there")
