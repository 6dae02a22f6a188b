"""Interleaved 1F1B: each mesh holds v chunks of the model, stage c S + d on mesh d of S.

Micro-batches go through in groups of S: a mesh runs the forwards of a group on its first chunk,
then on its second, and so on; backwards in the reverse order of chunks. Mesh d runs 2 (S - d - 1) +
(v - 1) S forwards first, then one forward and one backward in turn (Narayanan et al., 2021,
"Efficient large-scale language model training"). The bubble is that of 1F1B divided by v.
"""

from __future__ import annotations

from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.schedules.work import Work, WorkLists


def interleaved_1f1b(meshes: int, batches: int, chunks: int) -> WorkLists:
    """Interleaved 1F1B.

    Raises:
        ScheduleError: the micro-batches are no multiple of the meshes.
    """
    if batches % meshes:
        more = -(-batches // meshes) * meshes
        raise ScheduleError(
            f"interleaved-1f1b runs micro-batches in groups of {meshes}, the meshes, and "
            f"{batches} is no multiple of that; take {more} micro-batches"
        )
    return WorkLists(lists=tuple(_list(meshes, batches, chunks, d) for d in range(meshes)))


def _list(meshes: int, batches: int, chunks: int, d: int) -> tuple[Work, ...]:
    def place(number: int) -> tuple[int, int]:
        """The chunk and the micro-batch of a mesh's work, counted in its direction."""
        group, inside = divmod(number, meshes * chunks)
        chunk, m = divmod(inside, meshes)
        return chunk, group * meshes + m

    def forward(number: int) -> Work:
        chunk, m = place(number)
        return Work(chunk * meshes + d, "forward", m)

    def backward(number: int) -> Work:
        chunk, m = place(number)
        return Work((chunks - 1 - chunk) * meshes + d, "backward", m)

    total = batches * chunks
    first = min(total, 2 * (meshes - d - 1) + (chunks - 1) * meshes)
    works = [forward(number) for number in range(first)]
    for number in range(total):
        if first + number < total:
            works.append(forward(first + number))
        works.append(backward(number))
    return tuple(works)
