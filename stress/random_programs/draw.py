"""Draws random programs from seeds.

program = draw(7)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stress.random_programs import features as random_features
from stress.random_programs import layers
from stress.random_programs.blocks import Block
from stress.random_programs.features import Base, Features
from stress.random_programs.layers import Size
from stress.random_programs.optimizers import OPTIMIZERS
from stress.random_programs.program import STREAM, RandomProgram

DTYPES = {"f32": 0.5, "f64": 0.2, "bf16": 0.1, "f16": 0.08, "mixed": 0.12}
"""How often each is drawn; `mixed` computes in bf16 and keeps parameters in f32."""
EXTRAS = {
    "outputs": 0.2,
    "mean": 0.2,
    "count": 0.2,
    "largest": 0.1,
    "inputs": 0.1,
    "gradients": 0.15,
    "marks gradients": 0.4,
    "twice": 0.1,
    "frozen": 0.15,
    "average": 0.12,
    "running": 0.12,
    "dropout": 0.12,
    "early loss": 0.15,
    "guarded": 0.12,
}
"""Parts of a program besides its blocks, and how often each is drawn."""
NUMBERS = {"none": 0.8, "factor": 0.07, "uncertainty": 0.07, "rate": 0.06}
"""The role of a scalar, and how often each is drawn: a parameter that is a factor of the loss or
its uncertainty, or a rate of the update that depends on the loss."""
_INFERENCE = frozenset({"outputs", "mean", "count", "largest", "inputs"})


def draw(seed: int) -> RandomProgram:
    """Draws the program of a seed."""
    program = draw_base(seed)
    base = Base(
        seed=seed,
        training=program.training,
        narrow=program.narrow,
        blocks=len(program.blocks),
        groups=len(program.params()),
        micro_batch=program.micro_batch,
        inputs=frozenset(program.batch(0)),
        running="running" in program.extras,
        dropout="dropout" in program.extras,
    )
    return replace(program, features=random_features.draw(base))


def draw_base(seed: int) -> RandomProgram:
    """Draws the program of a seed without the features of `features.py`.

    If it has running means, each of its micro-batches is a batch of its own.
    """
    generator = np.random.default_rng([STREAM, seed, 0])
    training = bool(generator.random() < 0.75)
    dtype = str(generator.choice(list(DTYPES), p=list(DTYPES.values())))
    size = int(generator.choice([3, 4, 6, 8])), int(generator.choice([4, 6, 8, 12]))
    tokens = bool(generator.random() < 0.4)
    blocks = _draw_blocks(generator, size)
    out = blocks[-1].layer.size
    heads = ["squares", "cross-entropy"]
    if tokens and out[1] == size[1]:
        heads.append("tied")
    extras = {name for name, share in EXTRAS.items() if generator.random() < share}
    program = RandomProgram(
        seed=seed,
        training=training,
        dtype=dtype,
        optimizer=str(generator.choice(list(OPTIMIZERS))),
        size=size,
        tokens=tokens,
        head=str(generator.choice(heads)),
        blocks=blocks,
        extras=frozenset(extras if training else extras & _INFERENCE),
        micro_batch=int(generator.choice([1, 2, 3, 4, 8])),
        micro_batches=int(generator.choice([1, 2, 4], p=[0.12, 0.44, 0.44])),
        number=str(generator.choice(list(NUMBERS), p=list(NUMBERS.values()))),
    )
    if "running" in program.extras:
        program = replace(program, features=Features(mode="independent"))
    return program if training else replace(program, number="none")


def _draw_blocks(generator: np.random.Generator, size: Size) -> tuple[Block, ...]:
    blocks: list[Block] = []
    sizes = [size]
    marks = generator.random() < 0.25
    for number in range(int(generator.integers(2, 8))):
        block = Block(layer=layers.draw(generator, sizes[-1]), owner=number)
        like = [n for n in range(number) if sizes[n] == sizes[-1] and not blocks[n].shared]
        if like and generator.random() < 0.15:
            owner = int(generator.choice(like))
            block = replace(block, layer=blocks[owner].layer, owner=owner, shared=True)
        sizes.append(block.layer.size)
        back = [n - 1 for n in range(number + 1) if sizes[n] == sizes[-1]]
        if back and generator.random() < 0.35:
            block = replace(block, skip=int(generator.choice(back)))
        block = replace(
            block,
            checkpoint=bool(generator.random() < 0.12),
            boundary=bool(marks and generator.random() < 0.6),
        )
        blocks.append(block)
    return tuple(blocks)
