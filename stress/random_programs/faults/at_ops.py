"""Plants a fault at one op of a program, in the module of the op's stage.

The program's seed draws the place: a mistake at a single op is harder to find than one at all ops
of a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alpa.dialects import bytecode, ir, main_function, parse, sdy, walk_outside_manual
from alpa.dialects.sharding import Mesh
from alpa.passes.plan.data import Fragment, Program
from alpa.runtime.executable import Executable
from alpa.runtime.exported import module_name
from stress.random_programs.faults.planting import Fault, Sound


@dataclass(frozen=True, kw_only=True)
class Place:
    """An op of an exported module, and its fragment."""

    op: ir.OpView
    module: ir.Module
    fragment: Fragment
    program: Program

    @property
    def mesh(self) -> Mesh:
        """The only mesh of an exported module."""
        (op,) = (op for op in self.module.body.operations if isinstance(op, sdy.MeshOp))
        return Mesh.from_attr(op.mesh)


def at_one_op(
    name: str, *, where: Callable[[Place], bool], change: Callable[[Place], None]
) -> Fault:
    """A fault at one of the suitable ops; `change` writes before that op."""

    def plant(sound: Sound) -> Executable | None:
        places = [place for place in _places(sound) if where(place)]
        if not places:
            return None
        place = places[sound.draw(len(places))]
        with place.module.context, place.op.location, ir.InsertionPoint(place.op):
            change(place)
        place.module.operation.verify()
        changed = {module_name(place.fragment): bytecode(place.module.operation)}
        return sound.with_modules(changed)

    return Fault(name=name, where="stage", plant=plant)


def _places(sound: Sound) -> list[Place]:
    """All ops of all stages, in copies of their modules."""
    places: list[Place] = []
    for fragment in sound.program.fragments:
        module = parse(sound.modules[module_name(fragment)])
        places += [
            Place(op=op, module=module, fragment=fragment, program=sound.program)
            for op in walk_outside_manual(main_function(module).entry_block)
        ]
    return places
