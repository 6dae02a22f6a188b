"""Sets of op names: element-wise ops, ops that only move data, and others."""

from __future__ import annotations


def _names(dialect: str, names: str) -> frozenset[str]:
    return frozenset(f"{dialect}.{name}" for name in names.split())


# One element of the result needs the elements at the same place of the operands only; an operand
# may be a scalar instead (the predicate of select, the limits of clamp).
ELEMENTWISE_STABLEHLO = _names(
    "stablehlo",
    """abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine
    count_leading_zeros divide exponential exponential_minus_one floor imag is_finite log
    log_plus_one logistic map maximum minimum multiply negate not or popcnt power real
    reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left
    shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh
    uniform_dequantize uniform_quantize xor""",
)
ELEMENTWISE_CHLO = _names(
    "chlo",
    """_asin_acos_kernel acos acosh asin asinh atan atanh bessel_i1e conj cosh digamma erf erf_inv
    erfc is_inf is_neg_inf is_pos_inf lgamma mulhi next_after polygamma sinh square tan zeta
    broadcast_add broadcast_and broadcast_atan2 broadcast_compare broadcast_complex
    broadcast_divide broadcast_maximum broadcast_minimum broadcast_multiply broadcast_next_after
    broadcast_or broadcast_polygamma broadcast_power broadcast_remainder broadcast_select
    broadcast_shift_left broadcast_shift_right_arithmetic broadcast_shift_right_logical
    broadcast_subtract broadcast_xor broadcast_zeta""",
)

# Without cost of their own: each takes over the sharding of one operand.
TRIVIAL = (
    ELEMENTWISE_STABLEHLO
    | ELEMENTWISE_CHLO
    | _names("stablehlo", "broadcast broadcast_in_dim reduce reshape transpose")
)

# They compute nothing either, but a sharded dimension may need the neighbours' data, so the solver
# decides their shardings.
DATA_MOVEMENT = _names(
    "stablehlo", "concatenate dynamic_slice dynamic_update_slice pad reverse slice"
)

SOURCES = (
    _names("stablehlo", "constant iota")
    | _names("chlo", "constant constant_like")
    | _names("sdy", "constant")
)

BROADCASTS = _names("stablehlo", "broadcast broadcast_in_dim")

ELEMENTWISE = ELEMENTWISE_STABLEHLO | ELEMENTWISE_CHLO

# Element-wise ops that are linear in all operands together.
SUMS = _names("stablehlo", "add complex subtract")

# Ops of one operand, element by element, that are linear but for rounding.
LINEAR = _names("stablehlo", "convert imag negate real reduce_precision") | {"chlo.conj"}

# Ops of one operand, element by element, whose second derivative is not zero; `power` has two.
CURVED = _names(
    "stablehlo",
    """cosine exponential exponential_minus_one log log_plus_one logistic power rsqrt sine sqrt
        tanh""",
) | {"chlo.erf", "chlo.square"}

# Sums of products: linear in each operand.
CONTRACTIONS = _names("stablehlo", "convolution dot dot_general")

# Linear in each of two operands.
OF_FACTORS = _names("stablehlo", "convolution dot_general multiply")

# Ops whose average over the micro-batches is not the op applied to their operands' averages.
PRODUCTS = OF_FACTORS | _names(
    "stablehlo", "divide dynamic_slice dynamic_update_slice gather scatter select"
)

# Ops that XLA fuses into their readers, and the readers that it fuses them into.
FUSIBLE = ELEMENTWISE | BROADCASTS | SOURCES | DATA_MOVEMENT | _names("stablehlo", "transpose")
READS_THROUGH_FUSION = FUSIBLE | _names("stablehlo", "reduce")

# Ops that can go when nobody uses their results.
PURE = (
    TRIVIAL
    | DATA_MOVEMENT
    | SOURCES
    | _names(
        "stablehlo",
        """cholesky convolution dot dot_general fft gather get_tuple_element reduce_window scatter
        select_and_scatter sort triangular_solve tuple""",
    )
    | _names("chlo", "ragged_dot top_k")
)

# Ops that only compute on tensors, whatever attributes they have: no tokens, devices or targets.
ARITHMETIC = PURE - _names("stablehlo", "get_tuple_element tuple")

# Ops whose regions are programs of their own, not scalar functions.
CONTROL_FLOW = _names("stablehlo", "case if while") | _names("chlo", "scan")

# Ops that compute each element of a result from many elements of the operands, or from none.
NOT_BY_ELEMENT = (
    CONTRACTIONS
    | CONTROL_FLOW
    | SOURCES
    | _names(
        "stablehlo",
        "composite custom_call fft gather reduce reduce_window select_and_scatter sort",
    )
)

# Ops that move data or make it and compute nothing.
FREE = _names(
    "stablehlo",
    """broadcast_in_dim constant copy get_tuple_element iota optimization_barrier reshape return
    tuple""",
)

# Ops that devices compute together, in what is written for shards.
COLLECTIVES = _names(
    "stablehlo", "all_gather all_reduce all_to_all collective_permute reduce_scatter"
)

SHARD_MAP_CALLS = ("SPMDFullToShardShape", "SPMDShardToFullShape")
"""GSPMD's `shard_map` begins and ends with them."""
SHARDING_CALLS = ("Sharding", "xla.sdy.FuncResultSharding")
"""They return their operand. XLA writes the second where Shardy's shardings of results are exported
in a module that GSPMD can read, too."""
