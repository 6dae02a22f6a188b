"""The messages that bring a tensor from one mesh to another.

Any device that holds the source tile may send a piece. It comes from the device itself where it is
there already, else from a device of its own host, else from another host. The planner and the
runtime make the messages of a transfer by the same function, `deliver`. A transfer between large
meshes has hundreds of thousands of them, so they are arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from alpa.passes.solve.transfers.senders import Demands, balance
from alpa.passes.solve.transfers.tiles import (
    Box,
    Crossing,
    HostGroups,
    Integers,
    Pieces,
    box_of,
    numbered,
)

Method = Literal["send_recv", "local_all_gather", "local_reshard", "broadcast"]


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message: ``target`` gets ``box`` from ``source``. Both may be one device of both meshes,
    which keeps what it has."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Messages:
    """Messages that do not depend on one another."""

    sources: Integers
    """[message]: a device of the cluster, as in ``targets``"""
    targets: Integers
    boxes: Integers
    """[message, dimension, start or stop]"""

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Message]:
        rows = self.sources.tolist(), self.targets.tolist(), self.boxes.tolist()
        for source, target, box in zip(*rows, strict=True):
            yield Message(source=source, target=target, box=box_of(box))


def deliver(crossing: Crossing, method: Method) -> tuple[Messages, ...]:
    """The steps that bring a tensor into the layout in which it lands, ``crossing.target``'s. What
    is planned and what is run are the same.

    In a broadcast only the first one of the devices of a host that want a tile receives the pieces
    that come from other hosts. It passes them on to the others.
    """
    pieces, groups = crossing.pieces, crossing.groups
    # A group's devices get a piece before they get the next one.
    order = np.lexsort((pieces.position, pieces.number, groups.group[pieces.position]))
    if method != "broadcast":
        steps = [_received(crossing, pieces, order)]
    else:
        once = order[~pieces.slow[order] | (groups.member[pieces.position[order]] == 0)]
        steps = [_received(crossing, pieces, once), *_passed_on(crossing, pieces, groups, order)]
    return tuple(step for step in steps if len(step))


def _received(crossing: Crossing, pieces: Pieces, rows: Integers) -> Messages:
    """What devices of the destination get from the source."""
    position, boxes, slow = pieces.position[rows], pieces.boxes[rows], pieces.slow[rows]
    targets = np.array(crossing.target.devices)[position]
    holders, near = pieces.holders[rows], pieces.near[rows]
    devices = np.array(crossing.source.devices)[holders]
    itself = devices == targets[:, None]
    keeps = itself.any(axis=1)
    may_send = np.where(keeps[:, None], itself, near | slow[:, None])
    # The first choice is the device at the same place in its mesh, or as far into those that hold
    # the piece as the target is in its mesh. The others follow in a circle.
    counts: Integers = may_send.sum(axis=1)
    rank: Integers = np.cumsum(may_send, axis=1) - 1
    same = may_send & (holders == position[:, None])
    first = np.where(same.any(axis=1), (same * rank).sum(axis=1), position % np.maximum(1, counts))
    ends = np.cumsum(counts)
    place = (ends - counts)[:, None] + (rank - first[:, None]) % np.maximum(1, counts)[:, None]
    senders = np.empty(counts.sum(), np.int64)
    senders[place[may_send]] = devices[may_send]
    demands = Demands(
        num_bytes=np.where(keeps, 0, crossing.bytes_of(boxes)),
        slow=slow,
        senders=senders,
        ends=ends,
    )
    return Messages(sources=balance(demands, crossing.host_of), targets=targets, boxes=boxes)


def _passed_on(
    crossing: Crossing, pieces: Pieces, groups: HostGroups, order: Integers
) -> Iterator[Messages]:
    """What the first device of each group passes on: 1, 2, 4 ... devices at a time send it."""
    group, member = groups.group, groups.member
    leading = order[member[pieces.position[order]] == 0]
    entering = leading[pieces.slow[leading]]
    of_group = group[pieces.position[entering]]
    count = np.bincount(of_group, minlength=group.max() + 1)
    # A tile that enters as a whole is passed on as a whole.
    whole = count == np.bincount(group[pieces.position[leading]], minlength=len(count))
    tiles = crossing.target.boxes(crossing.shape)[pieces.position[entering]]
    boxes = np.where(whole[of_group, None, None], tiles, pieces.boxes[entering])
    boxes = boxes[~whole[of_group] | (np.diff(of_group, prepend=-1) > 0)]
    count[whole] = np.minimum(count[whole], 1)
    before = np.cumsum(count) - count
    devices = np.array(crossing.target.devices)
    places = np.lexsort((member, group))
    leaders = np.flatnonzero(member[places] == 0)
    for step in range(int(member.max()).bit_length()):
        takers = places[member[places] >> step == 1]
        givers = places[leaders[group[takers]] + member[takers] - (1 << step)]
        of_taker: Integers = count[group[takers]]
        yield Messages(
            sources=np.repeat(devices[givers], of_taker),
            targets=np.repeat(devices[takers], of_taker),
            boxes=boxes[np.repeat(before[group[takers]], of_taker) + numbered(of_taker)],
        )
