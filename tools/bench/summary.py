"""The effect of each variant on each class of cases, from the runs of all cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from alpa.tools.bench.ablation import BASE, Run
from alpa.tools.bench.cases import Case
from alpa.tools.output import markdown_header, markdown_row


@dataclass(frozen=True)
class Summary:
    """Collects runs case by case. The columns are the classes, in the order of their first case."""

    _ratios: dict[str, dict[str, list[float]]] = field(
        default_factory=dict[str, dict[str, list[float]]]
    )
    """by variant and class: seconds, as a ratio to those with the default settings"""
    _unsolved: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _classes: list[str] = field(default_factory=list[str])
    _worst: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    """by variant: the largest rise of an objective, and its case"""

    def add(self, case: Case, runs: Mapping[str, Run]) -> None:
        """Adds the runs of a case, from `ablation.compare`."""
        base = runs[BASE.name]
        if case.kind not in self._classes:
            self._classes.append(case.kind)
        for name, one in runs.items():
            if name == BASE.name:
                continue
            by_class = self._ratios.setdefault(name, {})
            by_class.setdefault(case.kind, []).append(one.seconds / base.seconds)
            if one.objective == math.inf:
                key = (name, case.kind)
                self._unsolved[key] = self._unsolved.get(key, 0) + 1
                continue
            rise = one.objective / base.objective - 1
            if rise > self._worst.get(name, (0.0, ""))[0]:
                self._worst[name] = rise, case.name

    def lines(self) -> Sequence[str]:
        """A Markdown table: a row per variant."""
        table = [markdown_header(("variant", *self._classes, "objective"))]
        for name, by_class in self._ratios.items():
            cells = [self._cell(name, kind, by_class.get(kind, [])) for kind in self._classes]
            rise, case = self._worst.get(name, (0.0, ""))
            table.append(
                markdown_row([f"`{name}`", *cells, f"{case}: {rise:+.2%}" if rise > 5e-5 else ""])
            )
        return table

    def _cell(self, name: str, kind: str, ratios: Sequence[float]) -> str:
        """The geometric mean, the least and the most, and the number of cases."""
        if not ratios:
            return ""
        mean = math.exp(float(np.mean(np.log(ratios))))
        text = f"{mean - 1:+.0%} ({min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%}), {len(ratios)}"
        unsolved = self._unsolved.get((name, kind), 0)
        return f"{text}, {unsolved} unsolved" if unsolved else text
