"""The arguments and results of @main by number, range of numbers, name, or beginning of names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from alpa.dialects import func, ir
from alpa.dialects.attributes import signature_attrs

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Names:
    """Arguments or results of @main: their names, where the program has them, and types.

    Names of arguments are those of their locations, names of results their `jax.result_info`.
    """

    noun: str
    names: Sequence[str | None]
    types: Sequence[ir.Type]

    @classmethod
    def of_arguments(cls, function: func.FuncOp) -> Names:
        arguments = list(function.entry_block.arguments)
        places = [argument.location for argument in arguments]
        names = [place.name_str if isinstance(place, ir.NameLoc) else None for place in places]
        return cls("argument", names, [argument.type for argument in arguments])

    @classmethod
    def of_results(cls, function: func.FuncOp) -> Names:
        types = list(function.type.results)
        known = signature_attrs(function, "res_attrs", len(types))
        infos = [attrs.get("jax.result_info") for attrs in known]
        names = [None if info is None else ir.StringAttr(info).value for info in infos]
        return cls("result", names, types)

    def select(self, selector: str) -> list[int]:
        """The numbers that a selector means: `7`, `0-15`, `batch['x']` or `params*`.

        Raises:
            ValueError: there is none.
        """
        if selector.isascii() and (match := _RANGE.fullmatch(selector)):
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if last < first:
                raise ValueError(f"{selector} is no range: its end comes before its start")
            if last >= len(self.names):
                raise ValueError(
                    f"there is no {self.noun} {last}; @main has {len(self.names)} {self.noun}s, "
                    "counted from 0"
                )
            return list(range(first, last + 1))
        prefix = selector.removesuffix("*")
        found = [
            number
            for number, name in enumerate(self.names)
            if name is not None
            if name == selector or (prefix != selector and name.startswith(prefix))
        ]
        if found:
            return found
        known = [name for name in self.names if name is not None]
        if not known:
            raise ValueError(
                f"no {self.noun} is called {selector}: the program has no names of its "
                f"{self.noun}s; use numbers, or keep the names (debug_info=True in jax)"
            )
        near = get_close_matches(selector, known, n=3, cutoff=0.6) or known[:4]
        shown = ", ".join(near) + (", ..." if len(known) > len(near) else "")
        raise ValueError(f"no {self.noun} is called {selector}; there are {shown}")
