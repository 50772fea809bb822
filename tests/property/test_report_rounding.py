"""Rounded tables add up, whatever the numbers are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretrain.report.tables import round_to_sum

VALUES = st.lists(st.floats(min_value=0.0, max_value=1e4), min_size=1, max_size=12)


@given(values=VALUES, decimals=st.integers(min_value=0, max_value=4))
def test_rounded_parts_sum_to_the_rounded_sum(values: list[float], decimals: int):
    rounded = round_to_sum(values, decimals)
    unit = 10.0**decimals
    assert round(sum(rounded) * unit) == round(sum(values) * unit)
    for value, shown in zip(values, rounded, strict=True):
        assert abs(value - shown) * unit <= 1.0 + 1e-6
        assert shown >= 0
