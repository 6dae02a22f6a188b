"""What `alpa doctor` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from alpa.tools.doctor.diagnosis import Diagnosis
from alpa.tools.doctor.packages import Package, install
from alpa.tools.doctor.probes import Devices, RayCluster


def lines(found: Diagnosis) -> Iterator[str]:
    """The diagnosis for people, problems last."""
    yield f"Alpa {found.alpa}, Python {found.python}, {found.system}"
    yield from _section("packages", map(_package, found.packages))
    yield from _section("extras", (_extra(*it) for it in found.extras.items()))
    yield from _section("devices", _devices(found))
    yield from _section("Ray", _ray(found.ray))
    yield from _section("compiling for GPUs without having one", _compiling(found))
    yield from _section("caches", _caches(found))
    if found.problems:
        problems = (
            f"{'error' if it.blocks else 'warning'}: {it.what}\n    remedy: {it.remedy}"
            for it in found.problems
        )
        yield from _section("problems", problems)
    yield ""
    yield f"Alpa can{'' if found.works else 'not'} plan and run here."


def _section(title: str, rows: Iterator[str]) -> Iterator[str]:
    yield f"\n{title}"
    for row in rows:
        yield from (f"  {line}" for line in row.splitlines())


def _package(it: Package) -> str:
    return f"{it.name} {it.version or 'is missing'} ({it.needed or 'any version'})"


def _extra(name: str, packages: tuple[Package, ...]) -> str:
    if all(it.fits for it in packages):
        return f"{name}: {', '.join(f'{it.name} {it.version}' for it in packages)}"
    return f"{name}: {', '.join(it.problem for it in packages if it.problem)}; {install(packages)}"


def _devices(found: Diagnosis) -> Iterator[str]:
    driver = found.driver
    if driver.version is not None:
        gpus = ", ".join(f"{n} x {name}" for name, n in Counter(driver.gpus).items())
        yield f"NVIDIA driver {driver.version}: {gpus or 'no GPU'}"
    for name, version in found.plug_ins.items():
        yield f"{name} {version}"
    yield _jax(found.devices)


def _jax(devices: Devices | None) -> str:
    if devices is None:
        return "not checked: packages are missing"
    if devices.platform is None:
        return "JAX does not start"
    kinds = ", ".join(f"{n} x {kind}" for kind, n in Counter(devices.kinds).items())
    step = f"planned for {devices.cluster} and run in {devices.seconds or 0:.1f} s"
    return f"JAX sees {kinds} ({devices.platform})\na step was " + (
        step if devices.cluster else "not planned or did not run"
    )


def _ray(ray: RayCluster | None) -> Iterator[str]:
    if ray is None:
        yield "not checked"
    elif ray.address is not None:
        resources = ", ".join(f"{count:g} {name}" for name, count in ray.resources.items())
        yield f"a cluster runs at {ray.address}: {ray.nodes} node(s) with {resources}"
    elif ray.seconds is not None:
        yield f"no cluster runs here; one starts in {ray.seconds:.1f} s"
    else:
        yield "no cluster can be joined or started"


def _compiling(found: Diagnosis) -> Iterator[str]:
    if found.compilers is None:
        yield "not checked: packages are missing"
        return
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name, missing in found.compilers.items():
        kinds.setdefault(missing, []).append(name)
    for missing, names in sorted(kinds.items()):
        for_these = f"for {', '.join(names)}"
        if missing:
            yield f"not possible {for_these}; pip install {' '.join(missing)}"
        else:
            yield f"possible {for_these}"


def _caches(found: Diagnosis) -> Iterator[str]:
    if found.caches is None:
        yield "not checked: packages are missing"
        return
    from alpa.passes.cost.device import size_text  # noqa: PLC0415 - numpy may be missing

    for it in found.caches:
        what = f"{it.files} files, {size_text(it.bytes)}" if it.exists else "does not exist yet"
        safe = "" if not it.exists else ", NOT SAFE" if it.problem else ", only you can write"
        yield f"{it.folder}: {what}{safe} ({it.use})"
