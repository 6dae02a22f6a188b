"""What `alpa-plan` compiles and writes: the check by XLA, the files, the executables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from alpa.passes.pipelines.clock import Clock
from alpa.runtime.compile_cache import UnsafeCacheError
from alpa.runtime.hlo_text import HloError
from alpa.runtime.planning import Planned
from alpa.tools.exporting import ExportFormat, remove_former, write_modules

# Planning a file needs no jax, which takes a second to import.
if TYPE_CHECKING:
    from alpa.runtime.ahead_of_time.compilation import Progress
    from alpa.runtime.ahead_of_time.exporting import Executables
    from alpa.runtime.ahead_of_time.verification import Verification


class CommandError(Exception):
    """The command cannot run. The message is complete."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def verify(
    options: argparse.Namespace, planned: Planned, clock: Clock, usable: int | None = None
) -> Verification:
    """Compiles the plan's stages. Raises CommandError."""
    from alpa.runtime.ahead_of_time.compilation import CompilationError  # noqa: PLC0415 - it needs jax
    from alpa.runtime.ahead_of_time.verification import verify_plan  # noqa: PLC0415 - it needs jax

    try:
        with clock.phase("verify"):
            return verify_plan(
                planned.module,
                compiler_options=dict(options.compiler_option),
                cache=options.verify_cache.expanduser(),
                executables=exports_executables(options),
                usable=usable,
                on_progress=_shown(clock),
            )
    except (CompilationError, HloError, UnsafeCacheError) as error:
        raise CommandError(f"the plan cannot be verified: {error}") from error


def check_files(paths: Mapping[str, Path | None], read: Mapping[str, str | Path]) -> None:
    """Checks the files that are to be written, before anything is planned.

    Args:
        paths: by the options that name them.
        read: the files that the command reads and that must stay, by what they are.

    Raises:
        CommandError: a file cannot be written, is read, or is that of two options.
    """
    named = dict[Path, str]()
    inputs = {Path(path).resolve(): what for what, path in read.items()}
    for option, path in paths.items():
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise CommandError(f"cannot write {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise CommandError(f"cannot write {path}: it is a folder")
        if path == Path(os.devnull):
            continue
        if str(path) == "-":
            raise CommandError(
                f"cannot write {option} to standard output, which has the plan's table; name a file"
            )
        if what := inputs.get(path.resolve()):
            raise CommandError(f"cannot write {option} to {path}: it is {what}; name another file")
        other = named.setdefault(path.resolve(), option)
        if other != option:
            raise CommandError(
                f"cannot write {path} for both {other} and {option}; give each a file of its own"
            )


def exports_executables(options: argparse.Namespace) -> bool:
    return options.export is not None and not options.no_executables


def export_form(options: argparse.Namespace) -> ExportFormat:
    """The form of the stages' modules. Raises CommandError where nothing is exported."""
    if options.export is None:
        given = {"--export-format": options.export_format, "--strip-sdy": options.strip_sdy}
        for name, value in given.items():
            if value:
                raise CommandError(f"{name} is for --export; add it, or remove {name}")
    return replace(options.export_format or ExportFormat(), keeps_sdy=not options.strip_sdy)


def write_outputs(
    options: argparse.Namespace,
    planned: Planned,
    others: Mapping[Path | None, str | None],
    clock: Clock,
) -> Executables | None:
    """Writes the requested files, the plan and what else says of it last. Exports the module in
    place.

    Raises CommandError.
    """
    texts: dict[Path, str] = {}
    if options.output is not None:  # The export changes the module.
        texts[options.output] = str(planned.module.operation.get_asm())
    texts |= {path: text for path, text in others.items() if path is not None and text is not None}
    executables: Executables | None = None
    try:
        if options.export is not None:
            with clock.phase("export-stages"):
                written = write_modules(planned.module, options.export, export_form(options))
            if exports_executables(options):
                executables = _export_executables(options, planned, clock)
            compiled = () if executables is None else executables.files
            remove_former(options.export, {*written, *compiled}, Path(options.program))
    except OSError as error:
        where = error.filename or options.export
        raise CommandError(f"cannot write {where}: {error.strerror}") from error
    write_texts(texts)
    return executables


def write_texts(texts: Mapping[Path, str]) -> None:
    """Writes files, all or none. Raises CommandError."""
    new = [path for path in texts if not path.exists()]
    for path, text in texts.items():
        try:
            path.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            for other in new:
                other.unlink(missing_ok=True)
            raise CommandError(f"cannot write {path}: {error.strerror}") from error


def _shown(clock: Clock) -> Callable[[Progress], None]:
    """Shows how many stages are compiled, where the clock shows phases."""
    begun = clock.on_phase

    def show(progress: Progress) -> None:
        kept = f", {progress.kept} of them earlier" if progress.kept else ""
        text = f"compiled {progress.done} of {progress.distinct} stages{kept}"
        begun(text, progress.done, progress.distinct)

    return show


def _export_executables(
    options: argparse.Namespace, planned: Planned, clock: Clock
) -> Executables | None:
    """Compiles the stages, if this machine can. Raises OSError, CommandError."""
    from alpa.runtime.ahead_of_time.compilation import (  # noqa: PLC0415 - it needs jax
        CompilationError,
        NoCompilerError,
    )
    from alpa.runtime.ahead_of_time.exporting import export_executables  # noqa: PLC0415 - it needs jax

    try:
        with clock.phase("compile"):
            return export_executables(
                planned.module,
                options.export / "executables",
                compiler_options=dict(options.compiler_option),
                cache=options.verify_cache.expanduser(),
                on_progress=_shown(clock),
            )
    except NoCompilerError as error:
        say(f"alpa-plan: no executables are exported: {error}")
        return None
    except (CompilationError, HloError, UnsafeCacheError) as error:
        raise CommandError(f"executables cannot be exported: {error}") from error
