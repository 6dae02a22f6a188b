"""The steps of the sharding solver and their tuned numbers, all in one place.

``python -m alpa.tools.bench solver`` measures what each step saves by leaving it out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum


class Step(Enum):
    """The steps that the search takes. Its claims hold without any of them."""

    DOMINANCE = "dominance"
    """``presolve`` drops strategies that another one is never worse than"""
    ELIMINATION = "elimination"
    """``presolve`` minimises out nodes with at most two neighbours"""
    TABLES = "tables"
    """bucket elimination, where the graph is narrow"""
    ASCENT = "ascent"
    """dual ascent (``bound.ascend``) before branch and bound"""
    FUSION = "fusion"
    """choices read off a relaxation are fused with each other (``fuse``)"""
    FUSION_OF_SEEN = "fusion_of_seen"
    """and with the last choices of other prices"""
    DESCENT = "descent"
    """changes node by node, without memory (``Messages.improve``)"""
    WARM_START = "warm_start"
    """dual ascent at new prices begins with the shifts of the last ones"""
    RELAXATION = "relaxation"
    """the linear relaxation, without memory, and an assignment read off it (``mip.relax``)"""
    FIXING = "fixing"
    """without memory, what cannot beat the best choice is forbidden, and presolve runs again"""
    OVERSIZED = "oversized"
    """strategies that alone exceed the memory that is left are forbidden (``fit``)"""
    GLANCE = "glance"
    """a few sweeps tell whether memory binds, before the problem without memory is solved"""
    ROW_CHECK = "row_check"
    """the least that any choice holds at a time, where no choice fits yet"""
    ROUGH_PRICES = "rough_prices"
    """prices by dual ascent alone"""
    LEVEL = "level"
    """prices near the best so far (level method), instead of where the planes are highest"""
    MORE_SWEEPS = "more_sweeps"
    """dual ascent goes on at the best prices"""
    COMBINATION = "combination"
    """branch and bound on the strategies of the choices seen (``combine``)"""
    EXACT_PRICES = "exact_prices"
    """prices by solving each priced problem"""
    FORESTS = "forests"
    """the best strategies of random forests, at prices of all times (``forests``)"""
    REPAIR = "repair"
    """a choice above the limit is repaired (``repair.repair``)"""
    DESCENT_WITHIN = "descent_within"
    """changes node by node within memory (``repair.improve_within``)"""


ALL = tuple(Step)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Numbers that decide how long the search stays where. None of them can make it wrong.

    Each was halved and doubled on 26 problems (docs/solver.md, "What a number is worth"). Commits
    in brackets are the experiments that first set a number.
    """

    # Tables and presolve
    entries: float = 5e6
    """Entries of the tables of bucket elimination: about 0.1 s, at 10 ns each."""
    fused_entries: float = 1e6
    """The same where choices are fused: about 0.01 s."""
    series_pairs: int = 4096
    """Pairs of strategies in the matrix that the elimination of a node with two neighbours may
    always make (64 x 64 strategies)."""
    restart_share: float = 0.1
    """Presolve runs again where at least this part of the strategies is forbidden."""

    # Dual ascent (bound)
    sweeps: int = 200
    """Double sweeps of dual ascent, at most."""
    look_every: int = 4
    """Double sweeps, at least, between two looks at the bound and at choices."""
    look_growth: float = 1.5
    """From one look to the next, so many times as many sweeps as have been made."""
    fused_roundings: int = 6
    """So many of the last choices read off the shifts are fused. Fusing roundings of both sweeps
    found in a dozen sweeps what one rounding needed fifty for (d1c66f2)."""
    stall: float = 1e-3
    """Ascent ends where a look improved the bound by less than this part of the gap."""
    enough_pruned: float = 0.2
    """Ascent ends where this part of the strategies can be forbidden: presolve makes the rest
    faster."""
    descent_rounds: int = 20
    """Rounds over the nodes of ``Messages.improve``."""
    approach_sweeps: int = 3
    """Double sweeps between two looks of ``approach``."""
    first_choices: int = 6
    """Double sweeps of ``approach`` before choices are read off; then again when there are twice as
    many."""
    late_choices: int = 4
    """Double sweeps between two looks for choices, where ``approach`` has ended and none is near.
    Each of them gives two choices. Of six problems of gpt-39b that were left to the LP for 2 to
    6 s, five are settled in 0.2 to 1.2 s."""
    late_sweeps: int = 16
    """The most double sweeps of that kind."""
    slow: float = 0.004
    """``approach`` ends where ``approach_sweeps`` close less than this part of the gap. At 0.02,
    meshes of wresnet-13b were left to the LP, for 2 s, that 0.8 s of sweeps settle (6218462)."""

    # Branch and bound (mip)
    largest_cost: float = 1e4
    """Costs are scaled to this, without unit: the dual tolerance of HiGHS, 1e-7, is then 1e-11 of
    the largest cost."""
    combination_nodes: int = 1000
    """Nodes of branch and bound in ``combine``."""
    combination_gap: float = 0.9
    """``combine`` ends where it has closed the gap to this part of the wanted one."""

    # Prices (within, prices)
    price_rounds: int = 100
    """Vectors of prices that are tried, at most."""
    level: float = 0.9
    """The level of the level method, as a part of what the planes promise: most of it, for a look
    costs far more than a step too long."""
    gain: float = 0.05
    """The search for prices ends where at most this part of the gap can be gained."""
    gain_of_gap: float = 0.1
    """It also ends within this part of the wanted gap."""
    idle_gain: float = 0.2
    """A round that raises the bound by less than this part of what ends the search is idle."""
    patience: int = 2
    """The search for prices ends after so many idle rounds."""
    exactness: float = 0.5
    """Priced problems are solved to this part of what ends the search."""
    fused_seen: int = 3
    """So many of the last choices are fused with those of the next prices."""
    fine: float = 0.01
    """Sweeps at the best prices end where they gain less than this part of the wanted gap. With
    them, the four meshes of moe-70b took 15 s instead of 34 s (ba3da6a)."""

    # Choices within memory (within, repair)
    far: float = 1.5
    """A choice that needs so many times the limit is not repaired: that is slow. Part of a change
    that took gpt-39b from 7.5 s to 4.9 s (434ebd5)."""
    surely: float = 1.2
    """Memory binds where a choice near the cheapest needs so many times the limit. Part of a change
    that took gpt-39b from 4.8 s to 2.3 s (840435a)."""
    coarse: float = 0.1
    """The gap of a look whether memory binds."""
    never: float = 1e3
    """Costs so many times that of a choice stand for "never", and spoil the arithmetic."""
    repair_changes: int = 20
    """Changes per node before the repair gives up."""
    repair_near: float = 0.1
    """An offer this near to the best known is taken. The repair with offers that grow stale ended
    minutes of search on gpt-39b without folding (130802e)."""
    descent_within_rounds: int = 20
    """Rounds over the nodes of ``improve_within``."""

    # Forests (forests). The instances are those of the contest, see docs/solver.md.
    large: int = 5000
    """Nodes above which forests are searched first, and Python visits no node again and again."""
    wide_gap: float = 0.2
    """Forests come before exact prices where the gap is a larger part of the cost than this."""
    wide: float = 20.0
    """The logarithm of the ratio between the first prices of the fullest and of an empty time."""
    price_growth: float = 0.5
    """The logarithm of the most that a price grows from one round to the next."""
    price_sweeps: int = 3
    """Double sweeps at each vector of prices."""
    polish: int = 4
    """Forests in turn, after which a choice read off the shifts seldom gains much."""
    nearly: float = 0.1
    """Prices of all times have grown enough where the excess is below this part of the limit."""
    growing: float = 0.4
    """The part of the time that prices may take until then."""
    fit_growth: float = 0.3
    """The logarithm of the most that a price grows in the first round to a choice that fits."""
    rough_prices: float = 0.5
    """The part of the time for prices of few times, where a problem is large and the first choice
    far from the bound. Without them U ended at 0.900 of the contest's best, with them at 0.850 and
    0.862 from two first choices."""
    fused_noisy: int = 4
    """Choices made at noisy costs that are fused with the best of a large problem."""
    balls: int = 3
    """Small neighbourhoods, per forest of the whole graph. None where a problem is large: with them
    U ended higher."""
    ball: int = 400
    """Nodes of a neighbourhood, at most."""
    return_every: int = 20
    """Rounds after which the best choice is changed, not the last one, and a large problem's is
    fused with others."""
    closing: float = 0.03
    """The part of the time that is left for checks of the result."""
    idle_rounds: int = 100
    """Rounds without a better choice after which a problem that is not large is left to others."""

    # Prices of the stage search (pareto)
    pareto_gain: float = 0.1
    """Sweeps end when they gain less than this part of the gap."""

    # Rounding: how far sums of floating point numbers in different orders may differ
    cost_rounding: float = 1e-9
    """A gap below this part of the cost."""
    bytes_rounding: float = 1e-12
    """An excess below this part of the memory limit."""
    matrix_rounding: float = 1e-13
    """A rest of a matrix below this part of its entries."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the solver's functions hand on to each other."""

    steps: Collection[Step] = ALL
    tuning: Tuning = field(default_factory=Tuning)


DEFAULT = Settings()
