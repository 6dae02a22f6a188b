"""The figures of chains, corrected by what programs take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest

from alpa.dialects import parse
from alpa.passes.cost.device import Call, Curve, Kind, Link, Machine, Transfer
from alpa.passes.cost.presets import PRESETS
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.calibration.fit import Fit
from alpa.runtime.calibration.in_programs import in_programs
from alpa.runtime.calibration.models import Model
from alpa.runtime.calibration.programs import Parts, ProgramSample, program_samples
from alpa.runtime.calibration.text import calibrated_text
from alpa.runtime.compare_programs import compare_programs
from alpa.runtime.planning import Settings, plan

_LAUNCH = 2e-6
_KINDS: tuple[Kind, ...] = ("matrix", "convolution", "elementwise")
_ALL, _HALF = 4, 2
TRUE = {"step": 3.0, "matrix": 1.2, "convolution": 2.5, "elementwise": 1.8, "transfer": 2.4}
MORE, WAIT, SHARE = 15e-6, 80e-6, 0.6


def chains() -> Fit:
    """Figures of a device, and of collectives in one group of 4."""
    preset = PRESETS["h100"]
    curve = Curve(((1e4, 1e-5), (1e6, 1e-3)))
    link = Link(
        bandwidth=1e9,
        latency=1e-5,
        collectives={"all-reduce": {4: curve}},
        transfer=Transfer(bandwidth=1e9, latency=1e-4),
    )
    device = replace(preset.device, launch=_LAUNCH, call=Call(1e-4, 1e-6, 1e-6))
    machine = Machine(device=device, intra_host=link, inter_host=preset.inter_host)
    return Fit(machine=machine, residuals={}, spread=0.0)


def samples() -> Iterator[ProgramSample]:
    """What a machine takes that `TRUE`, `MORE` and `WAIT` describe."""
    for devices, share in ((_ALL, 1.0), (_HALF, SHARE)):
        for number in range(12):
            work: dict[Kind, float] = {
                kind: (1 + number * (3 + 2 * k) % 7) * 1e-3 for k, kind in enumerate(_KINDS)
            }
            parts = Parts(
                call=1e-4 * (number % 3),
                work=work,
                kernels=float(10 * (number % 4)),
                collectives=float(5 * (number % 5)),
                collective_seconds=1e-4 * number,
            )
            seconds = parts.call + parts.collective_seconds + parts.kernels * (_LAUNCH + MORE)
            seconds += sum(TRUE[kind] * it for kind, it in work.items()) + parts.collectives * WAIT
            yield ProgramSample(
                devices=devices, what="module", parts=parts, seconds=share * seconds
            )
        yield ProgramSample(
            devices=devices, what="step", parts=Parts(step=1e-3), seconds=TRUE["step"] * 1e-3
        )
    for moves in (1e-3, 4e-3):
        yield ProgramSample(
            devices=_ALL,
            what="moves",
            parts=Parts(moves=moves),
            seconds=TRUE["transfer"] * moves,
        )


def test_what_is_exact_is_found_again() -> None:
    before = chains()
    found = in_programs(before, samples())
    assert found.programs == pytest.approx({**TRUE, "launch": MORE, "wait": WAIT}, rel=1e-3)
    assert found.residuals["programs"] < 1e-3
    device, chain = found.machine.device, before.machine.device
    assert device.launch == pytest.approx(_LAUNCH + MORE, rel=1e-3)
    assert device.call == chain.call
    assert device.step_call == pytest.approx([3 * it for it in chain.call], rel=1e-3)
    assert device.alone == ((2.0, pytest.approx(SHARE, rel=1e-3)), (4.0, pytest.approx(1.0)))
    for flops in (1e8, 1e11):
        ratio = device.seconds(flops, 0.0, "f32") / chain.seconds(flops, 0.0, "f32")
        assert ratio == pytest.approx(TRUE["matrix"], rel=1e-3)
    ratio = device.seconds(0.0, 1e8, "f32") / chain.seconds(0.0, 1e8, "f32")
    assert ratio == pytest.approx(TRUE["elementwise"], rel=1e-3)
    curve = found.machine.intra_host.collectives["all-reduce"][4]
    assert curve.seconds(1e4) == pytest.approx(1e-5 + WAIT, rel=1e-3)
    transfer = found.machine.intra_host.between_meshes
    assert transfer.latency == pytest.approx(TRUE["transfer"] * 1e-4, rel=1e-3)
    assert transfer.bandwidth == pytest.approx(1e9 / TRUE["transfer"], rel=1e-3)


def test_programs_are_never_faster_than_chains() -> None:
    fast = [replace(it, seconds=it.seconds / 100) for it in samples() if it.devices == _ALL]
    found = in_programs(chains(), fast)
    assert found.programs == pytest.approx(
        {**dict.fromkeys(TRUE, 1.0), "launch": 0.0, "wait": 0.0}, abs=1e-2
    )
    assert found.machine.device.alone == ()


def test_without_samples_nothing_changes() -> None:
    assert in_programs(chains(), []) == chains()


@pytest.mark.parametrize("kind", ["attention", "convolution"])
def test_the_models_are_programs_that_plans_compute(kind: str) -> None:
    model = Model(kind=kind, width=8, length=4, batch=4, layers=1)
    module = model.lower()
    planned = plan(module, Settings(cluster="cpu:1x4", inter="none"), Clock()).module
    assert not compare_programs(parse(str(module)), planned).is_fault


@pytest.mark.slow
def test_modules_and_steps_are_measured() -> None:
    # Figures of chains have efficiencies; those of the preset would be an ideal device's.
    cpu, efficiency = PRESETS["cpu"], PRESETS["h100"].device.efficiency
    machine = replace(cpu, device=replace(cpu.device, efficiency=efficiency))
    fit = replace(chains(), machine=machine)

    def text(devices: int) -> str:
        return calibrated_text(fit, hosts=1, devices_per_host=devices, about={}, comment="")

    models = [Model(kind="attention", width=16, length=8, batch=8)]
    found = list(program_samples(jax.devices()[:4], text, models, runs=3))
    modules = [it for it in found if it.what == "module"]
    # Two plans on all devices, one on two, one on one: each a module.
    assert [it.devices for it in modules] == [4, 4, 2, 1]
    assert all(it.seconds > 0 and it.parts.call >= 0 for it in found)
    parts = modules[0].parts
    assert parts.kernels > 0
    assert parts.collectives > 0
    assert set(parts.work) == {"matrix", "elementwise"}
    # Two stages on two devices each.
    moves = [it for it in found if it.what == "moves"]
    assert len(moves) == 1
    assert moves[0].parts.moves > 0
    assert moves[0].seconds > 0


def test_steps_in_a_row_are_no_modules() -> None:
    fit = replace(chains(), machine=PRESETS["cpu"])

    def text(devices: int) -> str:
        return calibrated_text(fit, hosts=1, devices_per_host=devices, about={}, comment="")

    models = [Model(kind="convolution", width=4, length=4, batch=4)]
    found = list(program_samples(jax.devices()[:1], text, models, runs=3, in_a_row=4))
    (step,) = found
    assert (step.what, step.devices) == ("step", 1)
    assert step.seconds > 0
