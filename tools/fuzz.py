"""Mutated input for the command line: what it answers must be an answer.

    python -m alpa.tools.fuzz test/passes --count 10000 --seed 0 --save found

Each case takes a file, or a part of one between `// -----` lines, breaks it in one to four places,
and gives it to `alpa-opt` with one of several pipelines or as bytecode, or to `alpa-plan`; a
`.toml` file is given as a cluster and as roles. The command runs in a process of its own, in an
empty folder, with bounded memory and time. It has to end with 0, or with 1 and a word why; a Python
traceback, a signal, a hang, or an output file that is written in spite of an error are findings.
What a case does follows from the seed and its number alone.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa.tools import alpa_opt, alpa_plan, plan_table
from alpa.tools.arguments import count

_SPLIT = re.compile(r"^// -----.*$", re.MULTILINE)
_TOKEN = re.compile(r"[%@#!^]?[\w.$-]+|\"[^\"\n]*\"|\S|\s+")
_NUMBERS = ("0", "-1", "1", "2", "7", "4294967296", "9223372036854775807", "99999999999999999999")
_ODD = ("\0", "\u2028", "\\", '"', "{", "}", "<", ">", "dense<[]>", "?", "x", "nan", "\r", "é")
_DEEP = 20_000
_MEMORY = 12 << 30
_PIPELINES = (
    "simplify-trivial-ops",
    "simplify-trivial-ops,split-loops,layer-cluster",
    "layer-cluster{num-layers=2}",
    "alpa{cluster=cpu:1x2}",
    "alpa{cluster=cpu:1x4 num-layers=2 num-stages=2 num-micro-batches=2}",
    "stage-mesh-partition{cluster=cpu:1x2}",
    "ilp-shard-annotate",
    "insert-cross-mesh-reshard",
    "export-stages",
    "verify-layers",
    "canonicalize,cse",
)
_EXAMPLES = """\
examples:
  python -m alpa.tools.fuzz test/passes --count 200
  python -m alpa.tools.fuzz step.mlir cluster.toml --count 10000 --seed 7 --save found
"""


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A text to break, and whether it is MLIR."""

    name: str
    text: str
    is_mlir: bool


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A case that was not answered: `problem` is traceback, signal, hang, silent or wrote."""

    case: int
    seed: str
    command: tuple[str, ...]
    problem: str
    said: str
    """the end of what it wrote to standard error"""
    data: bytes
    """the input"""


def seeds(paths: Sequence[Path]) -> list[Seed]:
    """The texts of files, and of the `.mlir` and `.toml` files under folders.

    Raises:
        ValueError: there are none.
    """
    files: list[Path] = []
    for path in paths:
        inside = [*path.rglob("*.mlir"), *path.rglob("*.toml")] if path.is_dir() else [path]
        files += sorted(inside)
    found: list[Seed] = []
    for file in files:
        is_mlir = file.suffix == ".mlir"
        text = file.read_text(encoding="utf-8")
        for part in _SPLIT.split(text) if is_mlir else [text]:
            found.append(Seed(name=file.name, text=part, is_mlir=is_mlir))
    if not found:
        raise ValueError("no .mlir or .toml file there")
    return found


def mutate(text: str, others: Sequence[str], generator: random.Random) -> str:
    """A text that is broken in one to four places; `others` are texts to take pieces from."""
    for _ in range(generator.randint(1, 4)):
        text = generator.choice(_MUTATIONS)(text, others, generator)
    return text


_Mutation = Callable[[str, Sequence[str], random.Random], str]


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def _drop(text: str, others: Sequence[str], generator: random.Random) -> str:
    tokens = _tokens(text)
    begin = generator.randrange(len(tokens) + 1)
    return "".join(tokens[:begin] + tokens[begin + generator.randint(1, 8) :])


def _repeat(text: str, others: Sequence[str], generator: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    begin = generator.randrange(len(lines))
    some = lines[begin : begin + generator.randint(1, 5)]
    where = generator.randrange(len(lines) + 1)
    return "".join(lines[:where] + some * generator.randint(1, 3) + lines[where:])


def _swap(text: str, others: Sequence[str], generator: random.Random) -> str:
    parts = text.splitlines(keepends=True) if generator.random() < 0.5 else _tokens(text)
    if len(parts) > 1:
        a, b = generator.sample(range(len(parts)), 2)
        parts[a], parts[b] = parts[b], parts[a]
    return "".join(parts)


def _number(text: str, others: Sequence[str], generator: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    match = generator.choice(found)
    return text[: match.start()] + generator.choice(_NUMBERS) + text[match.end() :]


def _replace(text: str, others: Sequence[str], generator: random.Random) -> str:
    tokens = _tokens(text)
    if not tokens:
        return text
    other = _tokens(generator.choice(others))
    tokens[generator.randrange(len(tokens))] = generator.choice(other or ["x"])
    return "".join(tokens)


def _rename(text: str, others: Sequence[str], generator: random.Random) -> str:
    """All occurrences of a word: an op, a value, an attribute, a type."""
    words = sorted(set(re.findall(r"[%@]?[A-Za-z_][\w.]*", text)))
    if len(words) < 2:
        return text
    old, new = generator.sample(words, 2)
    return text.replace(old, new)


def _insert(text: str, others: Sequence[str], generator: random.Random) -> str:
    where = generator.randrange(len(text) + 1)
    return text[:where] + generator.choice(_ODD) + text[where:]


def _cut(text: str, others: Sequence[str], generator: random.Random) -> str:
    return text[: generator.randrange(len(text) + 1)]


def _splice(text: str, others: Sequence[str], generator: random.Random) -> str:
    other = generator.choice(others)
    begin = generator.randrange(len(other) + 1)
    where = generator.randrange(len(text) + 1)
    return text[:where] + other[begin : begin + generator.randint(1, 400)] + text[where:]


def _nest(text: str, others: Sequence[str], generator: random.Random) -> str:
    """Brackets in brackets, which readers that call themselves do not survive."""
    where = [match.start() for match in re.finditer(r"[\[({<]", text)]
    if generator.random() < 0.9 or not where:
        return _swap(text, others, generator)
    at = generator.choice(where)
    return text[:at] + text[at] * _DEEP + text[at:]


_MUTATIONS: tuple[_Mutation, ...] = (
    _drop,
    _repeat,
    _swap,
    _number,
    _number,
    _replace,
    _replace,
    _rename,
    _insert,
    _cut,
    _splice,
    _nest,
)


def case(
    number: int, seed: int, corpus: Sequence[Seed]
) -> tuple[Seed, tuple[str, ...], bytes, Callable[[Sequence[str]], int]]:
    """What the case of a number is: its seed, the command's arguments, the input, the command."""
    generator = random.Random(f"{seed}:{number}")
    chosen = generator.choice(corpus)
    others = [it.text for it in corpus if it.is_mlir == chosen.is_mlir]
    text = mutate(chosen.text, others, generator)
    data = text.encode(errors="replace")
    if not chosen.is_mlir:
        if generator.random() < 0.5:
            arguments = ("module.mlir", "--cluster", "in.toml", "-o", "out")
        else:
            arguments = ("module.mlir", "--cluster", "cpu:1x1", "--roles", "in.toml", "-o", "out")
        return chosen, arguments, data, alpa_plan.command
    kind = generator.random()
    if kind < 0.1:
        return chosen, ("in.mlir", "--cluster", "cpu:1x2", "-o", "out"), data, alpa_plan.command
    if kind < 0.2:
        return chosen, ("in.mlir",), data, plan_table.command
    if kind < 0.4:
        data = _bytecode(chosen.text, generator) or data
    pipeline = generator.choice(_PIPELINES)
    return chosen, ("in.mlir", f"--pipeline={pipeline}", "-o", "out"), data, alpa_opt.command


def _bytecode(text: str, generator: random.Random) -> bytes | None:
    """A program as bytecode with a few wrong bytes; None where it is none."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.mlir", Path(folder) / "out"
        source.write_text(text, encoding="utf-8")
        # Names without the folder, which would be part of the bytecode.
        arguments = (source.name, "--emit-bytecode", "-o", target.name)
        _child(lambda: alpa_opt.main(arguments), Path(folder), 60)
        if not target.exists():
            return None
        data = bytearray(target.read_bytes())
    for _ in range(generator.randint(1, 6)):
        data[generator.randrange(4, len(data))] = generator.randrange(256)
    return bytes(data[: generator.randrange(4, len(data))] if generator.random() < 0.1 else data)


def run(number: int, seed: int, corpus: Sequence[Seed], seconds: float) -> Finding | None:
    """Runs a case; what is wrong with its answer."""
    chosen, arguments, data, main = case(number, seed, corpus)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / ("in.mlir" if chosen.is_mlir else "in.toml")
        file.write_bytes(data)
        if not chosen.is_mlir:
            (folder / "module.mlir").write_text(_MODULE, encoding="utf-8")
        status, said = _child(lambda: main(arguments), folder, seconds)
        problem = _problem(status, said, wrote=(folder / "out").exists())
    if problem is None:
        return None
    return Finding(
        case=number,
        seed=chosen.name,
        command=(main.__module__, *arguments),
        problem=problem,
        said=said[-2000:],
        data=data,
    )


_MODULE = """\
func.func public @main(%w: tensor<4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}
"""


def _problem(status: int | None, said: str, *, wrote: bool) -> str | None:
    if status is None:
        return "hang"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    if "Traceback (most recent call last)" in said or status not in (0, 1):
        return "traceback"
    if status == 1 and not said.strip():
        return "silent"
    return "wrote" if status == 1 and wrote else None


def _child(main: Callable[[], int], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Runs a command in a process of its own: its status, or None after a hang, and what it said.

    A negative status is the number of a signal. The process begins with what this one has loaded.
    """
    said = folder / "said"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.chdir(folder)
            error = os.open(said, os.O_WRONLY | os.O_CREAT)
            os.dup2(error, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # What this process writes through may lead elsewhere, as in tests.
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until the end
            status = main()
            sys.stdout.flush()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 2
        except BaseException as error:
            traceback.print_exception(error)
            raise
        finally:
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, _text(said)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(status), _text(said)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.fuzz",
        description="Gives broken programs, bytecode, clusters and roles to the command line, and "
        "reports what is not answered by a result or an error. The exit status is 1 if anything "
        "was found.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="files or folders to take texts from")
    add("--count", type=count, default=1000, help="cases; default: 1000")
    add("--first", type=int, default=0, help="number of the first case; default: 0")
    add("--seed", type=int, default=0, help="default: 0")
    add("--timeout", type=float, default=60, help="seconds for each case; default: 60")
    add("--save", type=Path, metavar="DIR", help="where to write the inputs that were found")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        corpus = seeds(options.paths)
    except (OSError, ValueError) as error:
        print(f"fuzz: error: {error}", file=sys.stderr)
        return 1
    begin, found = time.perf_counter(), Counter[str]()
    numbers = range(options.first, options.first + options.count)
    for number in numbers:
        finding = run(number, options.seed, corpus, options.timeout)
        if finding is None:
            continue
        found[finding.problem] += 1
        last = finding.said.strip().splitlines()[-1:] or [""]
        print(f"case {finding.case} of {finding.seed}: {finding.problem}: {last[0][:200]}")
        print(f"  {' '.join(finding.command)}", flush=True)
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
            stem = options.save / f"{options.seed}-{finding.case}"
            stem.with_suffix(".in").write_bytes(finding.data)
            stem.with_suffix(".txt").write_text(
                f"{' '.join(finding.command)}\n{finding.said}", encoding="utf-8"
            )
    kinds = ", ".join(f"{number} {problem}" for problem, number in found.items()) or "none"
    seconds = time.perf_counter() - begin
    print(f"{options.count} cases of {len(corpus)} texts in {seconds:.0f} s; findings: {kinds}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
