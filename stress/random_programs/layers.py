"""Layers of random programs: each maps [batch, length, width] to the same or another shape.

A layer is drawn for the size of its input and names the kinds of its ops. Values stay near 1, so
that nothing overflows in 16 bits. The functions have no jumps, and no gradient is zero except for
noise: no `relu`, no `argmax` of floats, no bias before a norm or a softmax. So equal programs give
equal numbers in any order of their sums, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Size = tuple[int, int]
"""Length and width."""
Params = Mapping[str, Any]

FLAGS = 6
"""The upper end of the number that selects branches."""
INDICES = 16
"""The upper end of the integers of a sample."""

_SMOOTH: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "sin": jnp.sin,
    "rational": lambda x: x / (1 + x * x),
}


class Inputs(NamedTuple):
    """The inputs of layers besides the values: integers [batch, length'] below INDICES, a number.

    `length'` is the length of the program's input, `flag` an int32 below FLAGS.
    """

    indices: Any
    flag: Any
    bytes: Any = None
    """uint8 [batch, length'], if something reads it"""
    mask: Any = None
    """bool [batch, length'], likewise"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`apply(params, x, inputs)` gives [batch, *size]; `shapes` are those of its parameters.

    Parameters are normally distributed with a deviation of one over the root of their last but one
    dimension. Those of one dimension have a mean of 1.
    """

    name: str
    kinds: frozenset[str]
    size: Size
    shapes: Mapping[str, tuple[int, ...]]
    apply: Callable[[Params, Any, Inputs], Any]


Draw = Callable[[np.random.Generator, Size], Layer]


def _one_of(generator: np.random.Generator, values: Any) -> Any:
    return values[int(generator.integers(len(values)))]


def _width(generator: np.random.Generator, width: int) -> int:
    """Mostly the input's width, as skip connections need."""
    return width if generator.random() < 0.6 else int(_one_of(generator, (3, 4, 6, 8, 12, 16)))


def _unit(x: Any) -> Any:
    """Values of about 1 at each position."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 0.1)


def dense(generator: np.random.Generator, size: Size) -> Layer:
    out, name = _width(generator, size[1]), _one_of(generator, tuple(_SMOOTH))
    shapes: dict[str, tuple[int, ...]] = {"w": (size[1], out)}
    if generator.random() < 0.7:
        shapes["b"] = (out,)

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        return _SMOOTH[name](x @ p["w"] + p.get("b", 0))

    kinds = frozenset({"dot", "element-wise"})
    return Layer(
        name=f"dense({out}, {name})", kinds=kinds, size=(size[0], out), shapes=shapes, apply=apply
    )


def gated(generator: np.random.Generator, size: Size) -> Layer:
    hidden = 2 * size[1]

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    shapes = {"gate": (size[1], hidden), "up": (size[1], hidden), "down": (hidden, size[1])}
    kinds = frozenset({"dot", "element-wise"})
    return Layer(name=f"gated({hidden})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def attention(generator: np.random.Generator, size: Size) -> Layer:
    heads, inner = int(_one_of(generator, (1, 2, 3, 4))), int(_one_of(generator, (2, 4)))
    causal = bool(generator.random() < 0.5)
    width = size[1]

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        q, k, v = (jnp.einsum("bsd,dhe->bhse", x, p[n]) for n in "qkv")
        scores = jnp.einsum("bhse,bhte->bhst", q, k) * inner**-0.5
        if causal:
            mask = np.tril(np.ones((size[0], size[0]), bool))
            scores = jnp.where(mask, scores, jnp.asarray(-1e4, scores.dtype))
        weights = jax.nn.softmax(scores, axis=-1)
        return x + jnp.einsum("bhst,bhte,hed->bsd", weights, v, p["o"])

    shapes = dict.fromkeys("qkv", (width, heads, inner)) | {"o": (heads, inner, width)}
    name = f"attention({heads} x {inner}{', causal' if causal else ''})"
    kinds = frozenset({"dot", "softmax", "reduction"})
    return Layer(name=name, kinds=kinds, size=size, shapes=shapes, apply=apply)


def norm(generator: np.random.Generator, size: Size) -> Layer:
    kind = _one_of(generator, ("layer", "rms", "length"))

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        axis = 1 if kind == "length" else -1
        centred = x if kind == "rms" else x - x.mean(axis, keepdims=True)
        square = (centred * centred).mean(axis, keepdims=True)
        return centred * jax.lax.rsqrt(square + 0.1) * p["scale"]

    kinds = frozenset({"norm", "reduction", "element-wise"})
    return Layer(
        name=f"norm({kind})", kinds=kinds, size=size, shapes={"scale": (size[1],)}, apply=apply
    )


def convolution(generator: np.random.Generator, size: Size) -> Layer:
    length, width = size
    taps = int(_one_of(generator, (1, 2, 3)))
    padding = _one_of(generator, ("SAME", "CAUSAL", "VALID"))
    if padding == "VALID" and taps >= length:
        padding = "SAME"
    stride = 2 if length >= 4 and generator.random() < 0.2 else 1
    dilation = 2 if padding != "VALID" and generator.random() < 0.2 else 1
    deep = generator.random() < 0.25
    out = width if deep else _width(generator, width)
    pads = {"CAUSAL": [((taps - 1) * dilation, 0)]}.get(padding, padding)

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        return jnp.tanh(
            jax.lax.conv_general_dilated(
                x,
                p["w"],
                (stride,),
                pads,
                rhs_dilation=(dilation,),
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=width if deep else 1,
            )
        )

    shape = (taps, 1 if deep else width, out)
    probe = jax.eval_shape(
        lambda x, w: apply({"w": w}, x, Inputs(indices=None, flag=None)),
        jax.ShapeDtypeStruct((1, *size), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    name = f"conv({taps} taps, {padding}, stride {stride}, dilation {dilation}, {width}->{out}"
    return Layer(
        name=f"{name}{', depthwise' if deep else ''})",
        kinds=frozenset({"convolution"}),
        size=(probe.shape[1], probe.shape[2]),
        shapes={"w": shape},
        apply=apply,
    )


def convolution_2d(generator: np.random.Generator, size: Size) -> Layer:
    channels = int(_one_of(generator, (2, 4)))

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        image = jnp.tanh(
            jax.lax.conv_general_dilated(
                x[..., None], p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        back = jax.lax.conv_general_dilated(
            image, p["v"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return x + back[..., 0]

    shapes = {"w": (3, 3, 1, channels), "v": (1, 1, channels, 1)}
    kinds = frozenset({"convolution"})
    return Layer(name=f"conv2d({channels})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def reduction(generator: np.random.Generator, size: Size) -> Layer:
    kind = _one_of(generator, ("mean", "logsumexp", "variance", "cumsum", "window", "product"))

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        if kind == "mean":
            y = x.mean(1, keepdims=True)
        elif kind == "logsumexp":
            y = jax.nn.logsumexp(x, axis=2, keepdims=True)
        elif kind == "variance":
            y = x.var(1, keepdims=True)
        elif kind == "cumsum":
            y = jnp.cumsum(x, axis=1) / size[0]
        elif kind == "window":
            y = jax.lax.reduce_window(
                x, np.zeros((), x.dtype), jax.lax.add, (1, 2, 1), (1, 1, 1), "SAME"
            )
        else:
            y = jnp.prod(1 + 0.1 * jnp.tanh(x), axis=1, keepdims=True)
        return x + y * p["scale"]

    kinds = frozenset({"reduction"})
    return Layer(
        name=f"reduce({kind})", kinds=kinds, size=size, shapes={"scale": (size[1],)}, apply=apply
    )


def gather(generator: np.random.Generator, size: Size) -> Layer:
    kind = _one_of(generator, ("table", "positions", "one-hot", "constant"))
    rows = generator.permutation(size[0]).astype(np.int32)

    def apply(p: Params, x: Any, inputs: Inputs) -> Any:
        index = inputs.indices[:, np.arange(size[0], dtype=np.int32) % inputs.indices.shape[1]]
        if kind == "table":
            return x + p["table"][index]
        if kind == "positions":
            moved = jnp.take_along_axis(x, (index % size[0])[..., None], axis=1)
        elif kind == "one-hot":
            return x + jax.nn.one_hot(index, INDICES, dtype=x.dtype) @ p["table"]
        else:
            moved = x[:, rows]
        return x + moved * p["scale"]

    shape = {"table": (INDICES, size[1])}
    shapes = shape if kind in ("table", "one-hot") else {"scale": (size[1],)}
    kinds = frozenset({"integers", "dot"} if kind == "one-hot" else {"gather", "integers"})
    return Layer(name=f"gather({kind})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def scatter(generator: np.random.Generator, size: Size) -> Layer:
    kind = _one_of(generator, ("samples", "rows", "table"))
    rows = generator.permutation(size[0]).astype(np.int32)[: max(1, size[0] // 2)]

    def apply(p: Params, x: Any, inputs: Inputs) -> Any:
        index = inputs.indices[:, np.arange(size[0], dtype=np.int32) % inputs.indices.shape[1]]
        if kind == "samples":
            where = jnp.arange(x.shape[0])[:, None], index % size[0]
            return x + 0.3 * jnp.zeros_like(x).at[where].add(x * p["scale"])
        if kind == "rows":
            return x.at[:, rows].add(x[:, rows] * p["scale"])
        table = jnp.zeros((INDICES, size[1]), x.dtype).at[p_rows].set(p["rows"])
        return x + table[index]

    p_rows = np.sort(generator.permutation(INDICES)[:5]).astype(np.int32)
    shapes = {"rows": (5, size[1])} if kind == "table" else {"scale": (size[1],)}
    kinds = frozenset({"scatter", "integers"})
    return Layer(name=f"scatter({kind})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def scan_layers(generator: np.random.Generator, size: Size) -> Layer:
    count, hidden = int(_one_of(generator, (2, 3, 4, 5))), 2 * size[1]
    remat = bool(generator.random() < 0.3)

    def one(x: Any, p: Params) -> tuple[Any, None]:
        return x + jnp.tanh(_unit(x) @ p["up"] + p["b"]) @ p["down"], None

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        return jax.lax.scan(jax.checkpoint(one) if remat else one, x, p)[0]

    shapes = {
        "up": (count, size[1], hidden),
        "b": (count, hidden),
        "down": (count, hidden, size[1]),
    }
    name = f"scan({count} layers{', checkpoint' if remat else ''})"
    return Layer(name=name, kinds=frozenset({"scan", "dot"}), size=size, shapes=shapes, apply=apply)


def recurrent(generator: np.random.Generator, size: Size) -> Layer:
    backwards = bool(generator.random() < 0.3)

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        def one(h: Any, row: Any) -> tuple[Any, Any]:
            h = jnp.tanh(row + h @ p["w"])
            return h, h

        rows = jnp.swapaxes(x, 0, 1)
        h = jax.lax.scan(one, jnp.zeros_like(rows[0]), rows, reverse=backwards)[1]
        return x + jnp.swapaxes(h, 0, 1)

    name = f"recurrent({'backwards' if backwards else 'forwards'})"
    kinds = frozenset({"scan", "dot"})
    return Layer(name=name, kinds=kinds, size=size, shapes={"w": (size[1], size[1])}, apply=apply)


def loop(generator: np.random.Generator, size: Size) -> Layer:
    trips = int(_one_of(generator, (2, 3)))

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        def one(i: Any, y: Any) -> Any:
            return y + jnp.sin(y * p["scale"]) * (0.1 * (i + 1)).astype(y.dtype)

        return jax.lax.fori_loop(0, trips, one, x)

    kinds = frozenset({"scan", "element-wise"})
    return Layer(
        name=f"loop({trips})", kinds=kinds, size=size, shapes={"scale": (size[1],)}, apply=apply
    )


def conditional(generator: np.random.Generator, size: Size) -> Layer:
    kind = _one_of(generator, ("cond", "switch", "select"))

    def apply(p: Params, x: Any, inputs: Inputs) -> Any:
        def one(y: Any) -> Any:
            return y + jnp.tanh(y @ p["w"])

        def two(y: Any) -> Any:
            return y * p["scale"]

        if kind == "cond":
            return jax.lax.cond(inputs.flag > 2, one, two, x)
        if kind == "switch":
            return jax.lax.switch(inputs.flag % 3, [one, two, jnp.sin], x)
        even = inputs.indices[:, :1, None] % 2 == 0
        return jnp.where(even, one(x), two(x))

    shapes = {"w": (size[1], size[1]), "scale": (size[1],)}
    kinds = frozenset({"cond", "integers"})
    return Layer(name=f"cond({kind})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def movement(generator: np.random.Generator, size: Size) -> Layer:
    length, width = size
    kind = _one_of(generator, ("reverse", "roll", "split", "pad", "transpose", "repeat", "slice"))
    sizes = {
        "transpose": (width, length),
        "pad": (length + 1, width),
        "slice": (max(2, length - 1), width),
        "repeat": (length, 2 * width),
    }
    if width > 12 and kind == "repeat":
        kind = "roll"

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        if kind == "reverse":
            return x + x[:, ::-1] * p["scale"]
        if kind == "roll":
            return x + jnp.roll(x, 1, axis=2) * p["scale"]
        if kind == "split":
            a, b = x[..., : width // 2], x[..., width // 2 :]
            return jnp.concatenate([b * p["scale"][: b.shape[-1]], jnp.sin(a)], axis=2)
        if kind == "pad":
            return jnp.pad(x * p["scale"], ((0, 0), (1, 0), (0, 0)))
        if kind == "transpose":
            return jnp.swapaxes(x * p["scale"], 1, 2)
        if kind == "repeat":
            return jnp.repeat(x * p["scale"], 2, axis=2)
        return (x * p["scale"])[:, : max(2, length - 1)]

    if kind == "slice" and length < 3:
        kind = "reverse"
    return Layer(
        name=f"move({kind})",
        kinds=frozenset({"element-wise", "movement"}),
        size=sizes.get(kind, size),
        shapes={"scale": (width,)},
        apply=apply,
    )


def experts(generator: np.random.Generator, size: Size) -> Layer:
    count = int(_one_of(generator, (2, 4)))

    def apply(p: Params, x: Any, _: Inputs) -> Any:
        gates = jax.nn.softmax(x @ p["router"], axis=-1)
        y = jnp.tanh(jnp.einsum("bsd,edf->ebsf", x, p["up"]))
        return x + jnp.einsum("ebsf,efd,bse->bsd", y, p["down"], gates)

    width = size[1]
    shapes = {
        "router": (width, count),
        "up": (count, width, 2 * width),
        "down": (count, 2 * width, width),
    }
    kinds = frozenset({"dot", "softmax", "reduction"})
    return Layer(name=f"experts({count})", kinds=kinds, size=size, shapes=shapes, apply=apply)


def dynamic_slice(generator: np.random.Generator, size: Size) -> Layer:
    update = bool(generator.random() < 0.5)

    def apply(p: Params, x: Any, inputs: Inputs) -> Any:
        row = jax.lax.dynamic_slice_in_dim(p["table"], inputs.flag, 1, axis=0)
        if update:
            start = inputs.flag % size[0]
            rows = jnp.broadcast_to(row[None], (x.shape[0], 1, size[1]))
            return x + jax.lax.dynamic_update_slice_in_dim(x * 0.5, rows, start, axis=1)
        return x * (1 + 0.3 * row)

    kinds = frozenset({"dynamic slice", "integers"})
    name = f"dynamic({'update' if update else 'slice'})"
    return Layer(name=name, kinds=kinds, size=size, shapes={"table": (FLAGS, size[1])}, apply=apply)


def bilinear(generator: np.random.Generator, size: Size) -> Layer:
    def apply(p: Params, x: Any, _: Inputs) -> Any:
        y = jnp.einsum("bsd,de,bte->bst", x, p["w"], x) / size[1]
        return x + jnp.einsum("bst,btd->bsd", jnp.tanh(y), x) / size[0]

    kinds = frozenset({"dot", "element-wise"})
    return Layer(
        name="bilinear", kinds=kinds, size=size, shapes={"w": (size[1], size[1])}, apply=apply
    )


LAYERS: tuple[tuple[float, Draw], ...] = (
    (4, dense),
    (1, gated),
    (2, attention),
    (2, norm),
    (2, convolution),
    (1, convolution_2d),
    (2, reduction),
    (2, gather),
    (2, scatter),
    (1.5, scan_layers),
    (1, recurrent),
    (0.5, loop),
    (2, conditional),
    (2, movement),
    (1, experts),
    (1, dynamic_slice),
    (1, bilinear),
)
"""How often each layer is drawn, relative to the others."""


def draw(generator: np.random.Generator, size: Size) -> Layer:
    """Draws a layer for values of this size."""
    weights = np.array([weight for weight, _ in LAYERS])
    number = generator.choice(len(LAYERS), p=weights / weights.sum())
    return LAYERS[int(number)][1](generator, size)
