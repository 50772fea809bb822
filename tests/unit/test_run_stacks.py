"""Stack files: the catalog's are valid, wrong ones are refused; precision words expand."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrain.errors import CatalogError, FileFormatError, InputError
from foretrain.graph.precision import Precision
from foretrain.run.precision import expand_precision
from foretrain.run.stacks import USUAL_STACK, list_stacks, load_stack, parse_stack, usual_stack
from foretrain.stack import Stack
from foretrain.strategy.plan import PRESETS

HEAD = 'name = "mine"\npreset = "ddp"\n'
BARE = Stack(name="bare", preset="ddp")


@pytest.mark.parametrize("name", list_stacks())
def test_every_stack_of_the_catalog_loads(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack.preset in PRESETS


def test_every_preset_has_a_usual_stack() -> None:
    for preset in PRESETS:
        assert USUAL_STACK[preset] in list_stacks()
    assert usual_stack("megatron", generation="volta") == "megatron"
    assert usual_stack("fsdp", generation="volta") == "fsdp"


def test_names_are_forgiving_and_unknown_ones_are_not() -> None:
    assert load_stack("Megatron_TE").name == "megatron-te"
    with pytest.raises(CatalogError, match="did you mean 'deepspeed'"):
        load_stack("deepspeeed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"', "x: preset: required field is missing"),
        (HEAD + "host_lunch_us = 3.0", "did you mean 'host_launch_us'?"),
        (HEAD + "host_op_us = nan", "must be a finite number >= 0 (got nan)"),
        (HEAD + "host_op_us = -1.0", "must be a finite number >= 0 (got -1.0)"),
        (HEAD + 'host_op_us = "fast"', "Expected `float`, got `str`"),
        (HEAD + "[kernels]\nx = inf", "x: kernels: x: must be a finite number"),
        (HEAD + "[precision.bf16]\ncompte = 'bf16'", "precision.bf16.compte: unknown role"),
        (HEAD + "[precision.bf16]\ncompute = 'bf61'", "unknown dtype (got 'bf61')"),
        ('name = "x"\npreset = "magetron"', "unknown preset (got 'magetron')"),
    ],
)
def test_wrong_stack_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        parse_stack(text, "x")
    assert message in str(caught.value)


def test_stack_files_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + "host_op_us = 3\n")
    assert load_stack(str(path)).host_op_us == 3.0
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not a text file"):
        load_stack(str(path))
    with pytest.raises(InputError, match="cannot read the stack file"):
        load_stack(str(tmp_path / "absent.toml"))


def parameter_bytes(roles: Precision) -> float:
    """Persistent bytes per parameter with Adam: weight, kept gradient, master, two moments."""
    master = roles.bytes("master") if roles.master else 0.0
    total = roles.bytes("weight") + roles.bytes("grad_accumulate")
    return total + master + 2 * roles.bytes("moments")


@pytest.mark.parametrize(
    ("preset", "word", "expected"),
    [
        ("megatron", "bf16", 18.0),
        ("megatron", "fp16", 16.0),
        ("deepspeed", "bf16", 16.0),
        ("fsdp", "bf16", 16.0),
        ("ddp", "bf16", 16.0),
        ("plain", "fp32", 16.0),
        ("ddp", "pure-bf16", 8.0),
    ],
)
def test_bytes_per_parameter_without_a_table(preset: str, word: str, expected: float) -> None:
    roles = expand_precision(word, {}, preset=preset, stack=BARE)
    assert roles is not None
    assert parameter_bytes(roles) == expected


def test_roles_win_over_the_stack_and_the_stack_over_the_preset() -> None:
    stack = Stack(
        name="s", preset="ddp", precision={"bf16": {"compute": "bf16", "moments": "bf16"}}
    )
    roles = expand_precision("bf16", {"grad": "fp16"}, preset="ddp", stack=stack)
    assert roles is not None
    assert (roles.moments, roles.grad, roles.weight) == ("bf16", "fp16", "fp32")
    none = expand_precision("bf16", {"master": "none"}, preset="megatron", stack=BARE)
    assert none is not None
    assert none.master is None


def test_tf32_is_a_way_to_compute_and_fp8_needs_a_table() -> None:
    roles = expand_precision("tf32", {}, preset="ddp", stack=BARE)
    assert roles is not None
    assert (roles.compute, roles.weight, roles.master) == ("tf32", "fp32", None)
    assert expand_precision("fp8", {}, preset="ddp", stack=BARE) is None


def test_megatron_keeps_gradients_of_fp16_in_fp16_and_those_of_bf16_in_fp32() -> None:
    stack = load_stack("megatron")
    for word, kept in (("fp16", "fp16"), ("bf16", "fp32")):
        roles = expand_precision(word, {}, preset="megatron", stack=stack)
        assert roles is not None
        assert (roles.grad_reduce, roles.grad_accumulate) == (kept, kept)
        assert (roles.master, roles.moments) == ("fp32", "fp32")
