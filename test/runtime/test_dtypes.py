from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from alpa.runtime.dtypes import numpy_dtype


@pytest.mark.parametrize(
    ("element_type", "dtype"),
    [("f32", np.float32), ("i1", np.bool_), ("ui8", np.uint8), ("bf16", ml_dtypes.bfloat16)],
)
def test_element_types(element_type: str, dtype: type) -> None:
    assert numpy_dtype(element_type) == np.dtype(dtype)


def test_unknown_element_types_are_refused() -> None:
    with pytest.raises(ValueError, match="element type f9 are not supported"):
        numpy_dtype("f9")
