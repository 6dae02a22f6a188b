"""The blocks of a module: its equal parts in lists, between which a layer may end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's blocks, in order.

    A block is an element of an `nn.ModuleList` or `nn.Sequential` that has parameters, and of whose
    class there is another one. Lists in lists are one list, and what is inside a block is no block.
    Elements without modules of their own, such as `nn.Linear`, are blocks only if there are no
    others, and then those of the class with the most parameters.
    """
    elements = [(name, part) for name, part in _elements("", module) if _size(part)]
    counts = Counter(type(part) for _, part in elements)
    repeated = [(name, part) for name, part in elements if counts[type(part)] > 1]
    if larger := [name for name, part in repeated if any(part.children())]:
        return tuple(larger)
    sizes: Counter[type[nn.Module]] = Counter()
    for _, part in repeated:
        sizes[type(part)] += _size(part)
    if not sizes:
        return ()
    [(largest, _)] = sizes.most_common(1)
    return tuple(name for name, part in repeated if type(part) is largest)


def _elements(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The elements of all outermost lists, with their names."""
    # Subclasses of lists, such as torchvision's Conv2dNormActivation, are modules of their own.
    is_list = type(module) in _LISTS
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if is_list and type(child) not in _LISTS:
            yield path, child
        else:
            yield from _elements(path, child)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
