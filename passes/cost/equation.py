"""The cost equation of TAPAS (section 4.6, equations 1 to 4), instead of roofline and rings.

A sharding pattern p costs the messages of its collectives alone. With W workers in a collective,
`alpha` the latency and `beta` the seconds per byte of their link, and a message of N bytes:

* (1) ``N(p) = N_fwd(p) + N_bwd(p)``
* (2) ``T_latency(p) = alpha W``
* (3) ``T_trans(p) = beta (N_fwd(p) + gamma N_bwd(p)) epsilon``
* (4) ``Cost = sum over p of T_latency(p) + T_trans(p)``

`gamma` says how much of the messages of backward and update parts is not hidden by computation,
`epsilon` how efficient each kind of collective is. N is what one device holds of the full array, as
in `collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from alpa.passes.cost.device import Collective, Link, Share


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The coefficients of equations 2 and 3.

    Raises:
        ValueError: one of them is not greater than 0 and at most 1.
    """

    gamma: float = 1.0
    """of messages in backward and update parts"""
    epsilon: Mapping[Collective, float] = field(default_factory=dict[Collective, float], hash=False)
    """by kind of collective; 1 for those that are not listed"""
    constants: bool = False
    """Whether constants are messages, as weights are; the paper filters them (appendix B)."""

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), *self.epsilon.items()):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be greater than 0 and at most 1, not {value:g}")
        for kind in self.epsilon:
            if kind not in get_args(Collective):
                known = ", ".join(get_args(Collective))
                raise ValueError(f"unknown collective {kind!r}; known: {known}")

    def seconds(
        self, kind: Collective, link: Link, workers: int, num_bytes: Share, *, backward: bool
    ) -> Share:
        """One term of equation 4: a collective of so many workers."""
        if workers == 1:
            return 0.0 * num_bytes
        discount = self.gamma if backward else 1.0
        transmission = num_bytes * (discount / link.bandwidth * self.epsilon.get(kind, 1.0))
        return link.latency * workers + transmission


def measured_epsilon(link: Link) -> dict[Collective, float]:
    """The coefficients of a link's measured collectives: their seconds per byte in the largest
    group, as shares of the slowest collective's.

    Raises:
        ValueError: no collectives of the link were measured.
    """
    if not link.collectives:
        raise ValueError("the link has no measured collectives; run alpa-calibrate")
    slopes: dict[Collective, float] = {
        kind: by_size[max(by_size)].line.per_byte for kind, by_size in link.collectives.items()
    }
    slowest = max(slopes.values())
    return {kind: slope / slowest for kind, slope in slopes.items()}


def parse_epsilon(text: str) -> dict[Collective, float]:
    """The coefficients in a text such as `all-reduce:0.5,all-gather:1`.

    Raises:
        ValueError: the text is something else.
    """
    found: dict[Collective, float] = {}
    for item in filter(None, text.split(",")):
        kind, colon, value = item.partition(":")
        known = {name: name for name in get_args(Collective)}
        if not colon or kind not in known:
            raise ValueError(
                f"{item!r} is no coefficient of a collective; write such as all-reduce:0.5, of "
                f"{', '.join(known)}"
            )
        try:
            found[known[kind]] = float(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is no number: {item!r}") from error
    return found
