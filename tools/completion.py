"""Scripts by which shells complete Alpa's commands, written by shtab from their parsers.

A script has the commands' options and values, files, the zoo's programs and the clusters' presets,
as they are in this version.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import shtab

from alpa.passes.cost.presets import PRESETS
from alpa.passes.schedules.named import NAMES
from alpa.passes.schedules.planned import TERAPIPE
from alpa.tools import alpa_calibrate, alpa_opt, alpa_plan_arguments, zoo

_FOLDERS = ("export", "verify_cache", "costs_folder")
_FILES = ("file", "output", "roles")
_WORDS = {
    "program": "_alpa_program",
    "cluster": "_alpa_cluster",
    "check": "_alpa_cluster",
    "schedule": "_alpa_schedule",
}
"""By the name of an argument, the function that completes it by words or files."""

_BASH = """\
{name}() {{
  compgen -W "{words}" -- "$1"
  compgen -f -- "$1"
}}
"""
_ZSH = """\
{name}() {{
  compadd -- {words}
  _files
}}
"""
_FISH = """\
function {name}
  printf '%s\\n' {words}
  __fish_complete_path (commandline -ct)
end
"""
_JOIN_COLONS = """\
# Bash splits words at colons, as in zoo:gpt-tiny. $1 completes the joined ones; what it offers is
# cut to the part after the last colon, which bash replaces.
_alpa_join_colons() {
  local joined=() before="" word i last
  for ((i = 0; i <= COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    last=$((${#joined[@]} - 1))
    if ((i > 1)) && [[ $word == : || $before == : ]]; then
      joined[last]+=$word
    else
      joined+=("$word")
    fi
    before=$word
  done
  last=$((${#joined[@]} - 1))
  local COMP_WORDS=("${joined[@]}") COMP_CWORD=$last
  "$1"
  word=${joined[last]}
  if [[ $word == *:* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*:}"}"}")
  fi
}
"""


def script(shell: str, alpa: argparse.ArgumentParser) -> str:
    """The script for a shell, of `alpa` and Alpa's other commands."""
    parsers = (
        alpa,
        alpa_plan_arguments.parser(),
        alpa_opt.parser(),
        alpa_calibrate.parser(),
    )
    return _SCRIPTS[shell](parsers)


def _bash(parsers: Sequence[argparse.ArgumentParser]) -> str:
    texts = [_completed(parser, "bash", _BASH) for parser in parsers]
    for parser in parsers:
        name = parser.prog.replace("-", "_")
        texts.append(
            f"_{name}_joined() {{ _alpa_join_colons _shtab_{name}; }}\n"
            f"complete -o bashdefault -F _{name}_joined {parser.prog}\n"
        )
    return "\n".join([*texts, _JOIN_COLONS])


def _zsh(parsers: Sequence[argparse.ArgumentParser]) -> str:
    # shtab's script registers itself only where it is evaluated, not in a file that is sourced.
    texts = (_completed(parser, "zsh", _ZSH) for parser in parsers)
    return "\n".join(f"eval \"$(cat <<'END_OF_ALPA'\n{text}\nEND_OF_ALPA\n)\"" for text in texts)


def _fish(parsers: Sequence[argparse.ArgumentParser]) -> str:
    return "\n".join(_completed(parser, "fish", _FISH) for parser in parsers)


_SCRIPTS: dict[str, Callable[[Sequence[argparse.ArgumentParser]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def _completed(parser: argparse.ArgumentParser, shell: str, function: str) -> str:
    """shtab's script of one command; `function` is the shell's way to offer words and files."""
    # argparse lists its arguments nowhere else; shtab reads them so, too.
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        complete = _how(action)
        if complete is not None:
            action.complete = complete  # pyright: ignore[reportAttributeAccessIssue]
    words = {
        "_alpa_program": [f"zoo:{name}" for name in zoo.names()],
        "_alpa_cluster": [f"{name}:1x8" for name in PRESETS],
        "_alpa_schedule": ["auto", *NAMES, TERAPIPE],
    }
    preamble = (function.format(name=it, words=" ".join(words[it])) for it in words)
    return shtab.complete(parser, shell, preamble="\n".join(preamble))


def _how(action: argparse.Action) -> object:
    """What shtab reads off an argument; None for one that it completes by itself."""
    if action.dest in _WORDS:
        name = _WORDS[action.dest]
        return {"bash": name, "zsh": name, "fish": f"({name})"}
    if action.dest in _FOLDERS:
        return shtab.DIRECTORY
    if action.type is Path or (action.dest in _FILES and not action.choices):
        return shtab.FILE
    return None
