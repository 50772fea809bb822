"""What a user's calibration file may hold: shipped entries pass, broken ones are named."""

from pathlib import Path

import pytest

from foretrain.cost.calibration import load
from foretrain.cost.operator_constants import TABLES, operators_text, read_operators
from foretrain.errors import FileFormatError

SHAPES = {
    "memory": "memory",
    "attention": "attention_fitted",
    "conv2d": "convolution_fitted",
    "moe_gemm": "moe_fitted",
}


def entry_of(kind: str) -> dict[str, object]:
    return {**next(e for e in load(SHAPES[kind])["entry"] if "devices" in e)}


@pytest.mark.parametrize("kind", TABLES)
def test_shipped_entries_pass(tmp_path: Path, kind: str) -> None:
    """What we ship ourselves must not be refused from a user."""
    shipped = [entry for entry in load(TABLES[kind])["entry"] if "devices" in entry]
    path = tmp_path / "c.toml"
    path.write_text(operators_text({kind: shipped}), encoding="utf-8")
    assert len(read_operators(path)[TABLES[kind]]) == len(shipped)


@pytest.mark.parametrize(
    ("kind", "key", "value", "word"),
    [
        ("memory", "l2_ratio", 0, "l2_ratio"),
        ("memory", "multi_tensor", 0, "multi_tensor"),
        ("memory", "op", {"rmsnorm": "x"}, "op.rmsnorm"),
        ("memory", "op", {"rmsnorm": [1]}, "op.rmsnorm"),
        ("memory", "op", {"rmsnorm": 0.0}, "op.rmsnorm"),
        ("memory", "op", {"rmsnorm": 2.0}, "op.rmsnorm"),
        ("memory", "op", [1], "op"),
        ("attention", "full", {"e_b": 0.5, "t0_us": 1.0, "g": 1.0}, "full.e"),
        ("attention", "causal", {}, "causal"),
        ("attention", "full", {"e": {"64": 0.5}}, "full.e_b"),
        ("attention", "e", {}, "e"),
        ("attention", "e", {"wide": 0.5}, "wide"),
        ("attention", "e", {"64": 9.0}, "e.64"),
        ("attention", "e", {"64": {}}, "e.64"),
        ("attention", "dim", 0.5, "dim"),
        ("attention", "full_backward", "a", "full_backward"),
        ("conv2d", "input_tiles", [1.0], "input_tiles"),
        ("conv2d", "non_fused", 0.0, "non_fused"),
        ("moe_gemm", "input_bytes", "a", "input_bytes"),
    ],
)
def test_a_broken_constant_is_named(
    tmp_path: Path, kind: str, key: str, value: object, word: str
) -> None:
    path = tmp_path / "c.toml"
    text = operators_text({kind: [{**entry_of(kind), key: value}]})
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError) as error:
        read_operators(path)
    assert word in str(error.value)
    assert "number 1" in str(error.value)
