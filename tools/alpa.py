"""`alpa`: checks the installation, and prints schemas and completion scripts.

    alpa doctor
    alpa schema plan
    alpa completion bash

`alpa-plan`, `alpa-opt` and `alpa-calibrate` are commands of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import resources
from typing import NoReturn

from alpa.tools.arguments import add_version
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import until_the_reader_goes

_EXAMPLES = """\
examples:
  alpa doctor                    is everything there to plan and run?
  alpa doctor --json > doctor.json
  alpa schema cluster > cluster.schema.json
  alpa completion bash > ~/.alpa.bash
  alpa --version
"""
_COMPLETION = """\
write it to a file that the shell reads when it starts, and again after an update of Alpa:
  alpa completion bash > ~/.alpa.bash     in ~/.bashrc: source ~/.alpa.bash
  alpa completion zsh > ~/.alpa.zsh       in ~/.zshrc, after compinit: source ~/.alpa.zsh
  alpa completion fish > ~/.config/fish/conf.d/alpa.fish
"""
_SCHEMAS = {
    "plan": ("alpa.passes.plan", "plan.schema.json"),
    "cluster": ("alpa.passes.cost", "cluster.schema.json"),
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    result = argparse.ArgumentParser(
        prog="alpa",
        description="Checks the installation of Alpa, and prints schemas and completion scripts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(result)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="say whether Alpa can plan and run here, what is missing, and how to install it",
        description="Prints the versions of what Alpa needs, the devices that JAX sees, whether "
        "Ray runs or starts, whether stages can be compiled for GPUs that are not here, and the "
        "caches. The exit status is 0 if Alpa can plan and run here, else 1.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for machines")
    doctor.add_argument("--no-ray", action="store_true", help="neither join nor start Ray")
    schema = commands.add_parser(
        "schema",
        help="print the JSON schema of PLAN.json or of cluster files",
        description="Prints a JSON schema, which describes each entry and its unit.",
        allow_abbrev=False,
    )
    schema.add_argument("file", choices=[*_SCHEMAS], help="plan: PLAN.json; cluster: TOML files")
    completion = commands.add_parser(
        "completion",
        help="print the script by which a shell completes Alpa's commands",
        description="Prints the script by which a shell completes Alpa's commands.",
        epilog=_COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    if options.command == "schema":
        package, name = _SCHEMAS[options.file]
        with until_the_reader_goes():
            print(resources.files(package).joinpath(name).read_text(encoding="utf-8"), end="")
        return 0
    try:
        if options.command == "completion":
            from alpa.tools.completion import script  # noqa: PLC0415 - it needs the extra

            with until_the_reader_goes():
                print(script(options.shell, parser()))
            return 0
        from alpa.tools.doctor import command as doctor  # noqa: PLC0415 - packages may be missing

        return doctor.run(json=options.json, with_ray=not options.no_ray)
    except ModuleNotFoundError as error:
        again = f"alpa {options.command}"
        _say(f"{error.name} is not installed; run pip install {error.name}, then {again} again")
        return 1


def _say(message: str) -> None:
    print(f"alpa: error: {message}", file=sys.stderr, flush=True)


def command() -> NoReturn:
    """The command `alpa`."""
    sys.exit(until_interrupted("alpa", main))


if __name__ == "__main__":
    command()
