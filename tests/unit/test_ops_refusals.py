"""Operators that cannot exist have a reason instead of a price, and nothing is silent."""

import numpy as np
import pytest

from foretrain.cli.main import main
from foretrain.cost.operators import Operators, time
from foretrain.errors import InputError
from foretrain.hardware.names import find_device
from foretrain.run.stacks import load_stack

H100 = find_device("h100-sxm")
STACK = load_stack("megatron-te")
HEAD = "id,device,op,dtype,latency_us"
CONV = {"op": "conv2d", "n": 8, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3}
MOE = {"op": "moe_gemm", "tokens": 64, "hidden": 512, "ffn": 512, "experts": 8, "topk": 2}
HEADS = {"op": "attention", "batch": 1, "seq_q": 128, "heads": 8, "head_dim": 64}
GEMM = {"op": "gemm", "m": 64, "n": 64, "k": 64}


@pytest.mark.parametrize(
    ("shape", "key", "value"),
    [
        (CONV, "stride", 0), (CONV, "stride", 0.5), (CONV, "padding", 0.5), (CONV, "groups", 0.5),
        (MOE, "topk", 0.5), (MOE, "tp", 0.5), (MOE, "tp", 3), (MOE, "gated", 7),
        (HEADS, "heads", 0.5), (HEADS, "causal", 5), (GEMM, "m", 0.5),
    ],
)  # fmt: skip
def test_an_impossible_operator_is_refused(tmp_path, capsys, shape, key, value):
    cells = {"id": "a1", "device": "h100-sxm", "dtype": "bf16", "latency_us": 9, **shape}
    cells[key] = value
    path = tmp_path / "x.csv"
    path.write_text(",".join(cells) + "\n" + ",".join(map(str, cells.values())) + "\n")
    assert main(["validate", "ops", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{key} {value}" in text
    assert "ids a1" in text


def test_a_latency_that_is_not_positive_is_said(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text(HEAD + ",m,n,k\n" + "a1,h100-sxm,gemm,bf16,-3,64,64,64\n")
    assert main(["validate", "ops", str(path)]) == 0
    assert "1 priced rows are not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "key"),
    [(GEMM, "b"), (MOE, "hidden"), (MOE, "ffn"), (CONV, "n"), (CONV, "k"), (HEADS, "batch")],
)
def test_columns_of_zeros_are_refused(shape, key):
    columns = {name: value for name, value in shape.items() if name != "op"} | {key: 0.0}
    with pytest.raises(InputError, match=f"{shape['op']}: {key}"):
        time(Operators(op=shape["op"], dtype="bf16", shape=columns), H100, STACK)


@pytest.mark.parametrize("op", ["gemm", "moe_gemm", "attention", "conv2d", "embedding_bag", "gelu"])
def test_empty_columns_give_an_empty_answer(op):
    names = ("m", "n", "k", "rows", "dim", "tokens", "hidden", "ffn", "experts", "topk")
    columns = {name: np.empty(0) for name in names}
    ops = Operators(op=op, dtype="bf16", shape=columns, bytes=np.empty(0))
    assert time(ops, H100, STACK).value_s.shape == (0,)
