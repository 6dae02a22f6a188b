"""Everything that `alpa doctor` finds, and what is wrong."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from alpa.tools.doctor import probes
from alpa.tools.doctor.packages import Package, extras, install, plug_ins, required, same
from alpa.tools.doctor.probes import Devices, Driver, RayCluster

# What needs jaxlib or jax is imported by the functions that use it: it may be missing.
if TYPE_CHECKING:
    from alpa.tools.doctor.caches import Cache


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is missing, too old, or broken."""

    what: str
    remedy: str
    """a command, or what to look at"""
    blocks: bool
    """whether Alpa cannot plan or run here"""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """This machine, as Alpa sees it. None: not checked, as packages are missing, or as asked."""

    alpa: str
    python: str
    system: str
    packages: tuple[Package, ...]
    extras: Mapping[str, tuple[Package, ...]]
    plug_ins: Mapping[str, str]
    """versions of JAX's packages for GPUs"""
    driver: Driver
    devices: Devices | None = None
    ray: RayCluster | None = None
    compilers: Mapping[str, tuple[str, ...]] | None = None
    """the packages that are missing to compile stages without having a GPU, by its name"""
    caches: tuple[Cache, ...] | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def works(self) -> bool:
        """Whether Alpa can plan and run here."""
        return not any(problem.blocks for problem in self.problems)


def diagnose(*, with_ray: bool = True) -> Diagnosis:
    """Looks at this machine; JAX and Ray are tried in processes of their own.

    Args:
        with_ray: whether to join or start a Ray cluster.

    Raises:
        PackageNotFoundError: Alpa is not installed, but imported from a folder.
    """
    found = Diagnosis(
        alpa=metadata.version("alpa-mlir"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages=required(),
        extras=extras(),
        plug_ins=plug_ins(),
        driver=Driver.here(),
    )
    if all(package.version is not None for package in found.packages):
        found = _examined(found, with_ray)
    return replace(found, problems=tuple(problems_of(found)))


def _examined(found: Diagnosis, with_ray: bool) -> Diagnosis:
    """With what needs the required packages."""
    from alpa.runtime.progress import progress  # noqa: PLC0415

    with progress("start JAX, plan and run a step") as show:
        devices, ray = probes.devices(), None
        if with_ray:
            show("join or start Ray")
            ray = probes.ray_cluster()
    return replace(found, devices=devices, ray=ray, compilers=_compilers(), caches=_caches())


def _compilers() -> dict[str, tuple[str, ...]]:
    from alpa.runtime.ahead_of_time.compilation import missing_packages  # noqa: PLC0415
    from alpa.runtime.ahead_of_time.targets import TARGETS  # noqa: PLC0415

    return {name: tuple(missing_packages(gpu)) for name, gpu in TARGETS.items()}


def _caches() -> tuple[Cache, ...]:
    from alpa.runtime.workers.options import WorkerOptions  # noqa: PLC0415
    from alpa.tools.alpa_plan_arguments import VERIFY_CACHE  # noqa: PLC0415
    from alpa.tools.doctor.caches import Cache  # noqa: PLC0415

    folders = (
        (WorkerOptions().cache_directory, "compiled stages of workers on Ray"),
        (VERIFY_CACHE, "results of alpa-plan --verify and --export"),
    )
    return tuple(Cache.of(Path(it).expanduser(), use) for it, use in folders if it is not None)


def problems_of(found: Diagnosis) -> Iterator[Problem]:
    """What is wrong, and what to do about it."""
    wrong = tuple(it for it in found.packages if not it.fits)
    if wrong:
        what = ", ".join(package.problem for package in wrong)
        yield Problem(what=what, remedy=install(wrong), blocks=True)
    for name, packages in found.extras.items():
        old = tuple(it for it in packages if it.version is not None and not it.fits)
        if old:
            what = f"extra {name}: {', '.join(package.problem for package in old)}"
            yield Problem(what=what, remedy=install(old), blocks=False)
    yield from _of_devices(found)
    if found.ray is not None and found.ray.problem:
        yield Problem(
            what=f"Ray can neither be joined nor started: {found.ray.problem}",
            remedy='executor="local" runs plans without Ray; see docs/running.md',
            blocks=True,
        )
    for cache in found.caches or ():
        if cache.problem:
            remedy = f"chmod -R go-w {cache.folder}"
            yield Problem(what=f"unsafe cache: {cache.problem}", remedy=remedy, blocks=True)


def _of_devices(found: Diagnosis) -> Iterator[Problem]:
    devices, driver = found.devices, found.driver
    jaxlib = next(package.version for package in found.packages if package.name == "jaxlib")
    for name, version in found.plug_ins.items():
        # JAX leaves the versions of ROCm's to pip.
        if jaxlib is not None and name.startswith("jax-cuda") and not same(version, jaxlib):
            yield Problem(
                what=f"{name} is {version}, and jaxlib {jaxlib}: JAX does not use it",
                remedy=f"pip install '{name}=={jaxlib}'",
                blocks=False,
            )
    if devices is None:
        return
    if devices.platform is None:
        what, remedy = "JAX does not start", 'python -c "import jax; jax.devices()"'
        yield Problem(what=f"{what}: {devices.problem}", remedy=remedy, blocks=True)
    elif devices.problem:
        yield Problem(
            what=f"a step cannot be planned and run: {devices.problem}",
            remedy="python -m alpa.tools.doctor.jax_probe",
            blocks=True,
        )
    elif devices.platform == "cpu" and driver.gpus:
        yield Problem(
            what=f"the driver has {len(driver.gpus)} x {driver.gpus[0]}, and JAX sees CPUs only",
            remedy="unset JAX_PLATFORMS" if found.plug_ins else "pip install 'jax[cuda12]'",
            blocks=False,
        )
