"""Rows of vision transformers: model, stack, plan and training by the words of their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row

CLASSES = ("vision_vit", "vision_cnn_or_vit")

#: Size -> layers, hidden, heads, MLP width.
SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "tiny": (12, 192, 3, 768),
    "small": (12, 384, 6, 1536),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "giant": (40, 1408, 16, 6144),
}
_LETTERS = {"S": "small", "B": "base", "L": "large"}
#: timm's names of the plain shape; weights of another training recipe do not change it.
_TIMM = re.compile(
    r"(?:vit|deit)_(tiny|small|base|large|giant)_patch(\d+)_(\d+)(_in21k|_sam|_miil)?"
)
#: The catalog's names: vit-b-16, vit-base-16.
_CATALOG = re.compile(r"vit-(s|b|l)(?:mall|ase|arge)?-(\d+)", re.IGNORECASE)
#: Images per step of fine-tuning in T5X's project, which takes images of 384 pixels for it
#: (NVIDIA/JAX-Toolbox, rosetta/projects/vit/README.md); pretraining has 4096 of 224.
FINE_TUNING = 512
#: Names of T5X's project: "vit ViT/B-16", "vit B/16".
_PROJECT = re.compile(r"vit (?:ViT/)?([SBL])[-/](\d+)")


def is_vit(row: Row) -> bool:
    """Returns whether the row is a vision transformer of the plain shape."""
    return row.model_class in CLASSES and _shape(row) is not None


def map_vit(row: Row, assumed: Assumed) -> Mapping[str, Any]:
    """Returns the `model` section."""
    shape = _shape(row)
    if shape is None:
        raise Unsupported("this image model is not in the catalog")
    size, patch, image = shape
    layers, hidden, heads, ffn = SIZES[size]
    if row.model.strip().lower() == "vit":
        assumed.add("model: ViT-B/16 (the source says vit)")
    model: dict[str, Any] = {
        "family": "vit", "layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn,
        "image": image, "patch": patch,
    }  # fmt: skip
    if row.model.endswith("_miil"):
        model["qkv_bias"] = False
    return model


def vit_name(row: Row) -> str:
    """Returns one name for all sources, e.g. vit-base-16 at 384 pixels; "vit" if it is none."""
    shape = _shape(row)
    return "vit" if shape is None else f"vit-{shape[0]}-{shape[1]} at {shape[2]} pixels"


def _shape(row: Row) -> tuple[str, int, int] | None:
    """Size, patch and pixels by the name; None for relatives (hybrids, relative positions)."""
    name = row.model.strip()
    if match := _TIMM.fullmatch(name):
        return match[1], int(match[2]), int(match[3])
    if match := _PROJECT.fullmatch(name):
        return _LETTERS[match[1]], int(match[2]), 384 if row.gbs == FINE_TUNING else 224
    if match := _CATALOG.fullmatch(name):
        return _LETTERS[match[1].upper()], int(match[2]), 224
    return ("base", 16, 224) if name.lower() == "vit" else None


def map_vit_stack(row: Row, assumed: Assumed) -> str:
    """Returns the stack: XLA for T5X, else PyTorch without compilation."""
    if has_word(row.framework, "t5x"):
        return "jax-xla"
    if re.search(r"timm|pytorch", row.framework, re.IGNORECASE):
        return "pytorch-eager"
    raise Unsupported(f"no stack is near the framework {row.framework!r} for images")


def map_vit_plan(row: Row, stack: str) -> dict[str, Any]:
    """Returns replicas, the only plan of the sources that is stated completely."""
    if (row.tp or 1) > 1 or (row.pp or 1) > 1:
        raise Unsupported("model-parallel image models are not modelled")
    if row.n_gpus == 1:
        return {"preset": "plain", "tp": 1, "pp": 1}
    xla = {"preset": "fsdp", "zero": 0} if stack == "jax-xla" else {"preset": "ddp"}
    return {**xla, "tp": 1, "pp": 1}


def map_vit_optimizer(row: Row) -> str:
    """Returns SGD with momentum for timm's benchmark, else AdamW."""
    return "sgd-momentum" if has_word(row.framework, "timm") else "adamw"
