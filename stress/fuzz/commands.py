"""Cases of the command line: a broken program, cluster or roles, given to one of the tools."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa.dialects import ir, parse
from alpa.passes.pipeline import PASSES, load_pass
from alpa.tools import alpa_opt, alpa_plan, alpa_plan_arguments, plan_table
from stress.fuzz import values
from stress.fuzz.corpus import PROGRAM, Corpus
from stress.fuzz.mutations import add_attributes, mutate, mutate_bytes
from stress.fuzz.process import Harm

_PIPELINES = (
    "simplify-trivial-ops",
    "simplify-trivial-ops,split-loops,layer-cluster",
    "layer-cluster{num-layers=2}",
    "alpa{cluster=cpu:1x2}",
    "alpa{cluster=cpu:1x4 num-layers=2 num-stages=2 num-micro-batches=2}",
    "stage-mesh-partition{cluster=cpu:1x2}",
    "place-gradient-reductions,ilp-shard-annotate",
    "insert-cross-mesh-reshard",
    "export-stages",
    "verify-layers",
    "canonicalize,cse",
)

Command = Callable[[Sequence[str]], int]


@dataclass(frozen=True, kw_only=True)
class CommandCase:
    """A command with a broken file. If it fails, it must not write its output.

    `guarded` runs the command in a process of its own, as users do, so that it also reports
    signals.
    """

    seed: str
    data: bytes
    file: str
    arguments: tuple[str, ...]
    main: Command
    guarded: Command

    @property
    def label(self) -> str:
        return " ".join((self.main.__module__, *self.arguments))

    def run(self, folder: Path) -> int:
        """Runs in the folder, which is empty and the current one."""
        (folder / self.file).write_bytes(self.data)
        if self.file == "in.toml":
            (folder / "module.mlir").write_text(PROGRAM, encoding="utf-8")
        status = self.main(self.arguments)
        self.check(folder, status)
        return status

    def check(self, folder: Path, status: int) -> None:
        """Raises Harm if a failed command has written something."""
        if status != 0 and (folder / "out").exists():
            raise Harm("wrote")


def draw(
    number: str, kind: str, corpus: Corpus, bytecode: Callable[[str], bytes | None]
) -> CommandCase:
    """Draws the case of a number and a kind: program, bytecode, attribute, option, table, cluster
    or roles."""
    generator = random.Random(number)
    if kind == "option":
        return _option_case(generator)
    if kind in ("cluster", "roles"):
        return _toml_case(kind, corpus, generator)
    if kind == "table":
        return _table_case(corpus, generator)
    seeds = corpus.of("program")
    chosen = generator.choice(seeds)
    # Drawn before the data, so that they do not depend on it.
    if generator.random() < 0.15:
        arguments, tool = ("in.mlir", "--cluster", "cpu:1x2", "-o", "out"), alpa_plan
    else:
        pipeline = generator.choice(_PIPELINES)
        arguments, tool = ("in.mlir", f"--pipeline={pipeline}", "-o", "out"), alpa_opt
    data = bytecode(chosen.text) if kind == "bytecode" else None
    if kind == "attribute":
        data = add_attributes(chosen.text, generator).encode(errors="replace")
    elif data is not None:
        data = mutate_bytes(data, generator)
    else:
        texts = [seed.text for seed in seeds]
        data = mutate(chosen.text, texts, generator).encode(errors="replace")
    return CommandCase(
        seed=chosen.name,
        data=data,
        file="in.mlir",
        arguments=arguments,
        main=tool.main,
        guarded=tool.command,
    )


def _option_case(generator: random.Random) -> CommandCase:
    """A program that can be planned, and options of a pass or of `alpa-plan` with odd values."""
    if generator.random() < 0.5:
        name = generator.choice(list(PASSES))
        known = list(load_pass(name).options())
        chosen = generator.sample(known, min(len(known), generator.randint(1, 3)))
        given = {key: values.text(generator) for key in chosen}
        if "cluster" in known:
            given = {"cluster": "cpu:1x2"} | given
        words = " ".join(f"{key}={value}" for key, value in given.items())
        arguments, tool = ("in.mlir", f"--pipeline={name}{{{words}}}", "-o", "out"), alpa_opt
    else:
        flags = [
            action.option_strings[-1]
            for action in alpa_plan_arguments.parser()._actions
            if action.option_strings and action.nargs != 0
        ]
        chosen = generator.sample(flags, generator.randint(1, 2))
        given = [word for flag in chosen for word in (flag, values.text(generator))]
        arguments = ("in.mlir", "--cluster", "cpu:1x2", "-o", "out", *given)
        tool = alpa_plan
    return CommandCase(
        seed="a program",
        data=PROGRAM.encode(),
        file="in.mlir",
        arguments=arguments,
        main=tool.main,
        guarded=tool.command,
    )


def _table_case(corpus: Corpus, generator: random.Random) -> CommandCase:
    seeds = corpus.of("plan")
    chosen = generator.choice(seeds)
    return CommandCase(
        seed=chosen.name,
        data=mutate(chosen.text, [seed.text for seed in seeds], generator).encode(errors="replace"),
        file="in.mlir",
        arguments=("in.mlir",),
        main=plan_table.main,
        guarded=plan_table.command,
    )


def _toml_case(kind: str, corpus: Corpus, generator: random.Random) -> CommandCase:
    seeds = corpus.of("roles" if kind == "roles" else "cluster")
    chosen = generator.choice(seeds)
    text = mutate(chosen.text, [seed.text for seed in seeds], generator)
    options = ("--cluster", "in.toml")
    if kind == "roles":
        options = ("--cluster", "cpu:1x1", "--roles", "in.toml")
    return CommandCase(
        seed=chosen.name,
        data=text.encode(errors="replace"),
        file="in.toml",
        arguments=("module.mlir", *options, "-o", "out"),
        main=alpa_plan.main,
        guarded=alpa_plan.command,
    )


def to_bytecode(text: str) -> bytes | None:
    """A program as bytecode; None if it does not parse."""
    buffer = io.BytesIO()
    try:
        parse(text).operation.write_bytecode(buffer)
    except ir.MLIRError:
        return None
    return buffer.getvalue()
