"""Rows of convolutional networks: model, stack, plan and training by the words of their sources."""

from __future__ import annotations

import re
from typing import Any

from foretrain.frontends.convnet_spec import is_conv_family
from foretrain.hardware import Device
from foretrain.validation.mapping.words import Assumed, Unsupported, first_number, has_word
from foretrain.validation.model_class import catalog_model
from foretrain.validation.rows import Row

CLASSES = ("vision_cnn", "vision_cnn_or_vit")

#: Names of sources -> models of the catalog; the whole name has to match. Weights of other training
#: recipes (ssl, swsl, tv, tf, gluon v1b) have the shape of the original.
MODELS: tuple[tuple[str, str], ...] = (
    (r"(?:tv_|ssl_|swsl_)?resnet-?(18|34|50|101|152)(?: v1\.5)?", r"resnet-\1"),
    (r"gluon_resnet(18|34|50|101|152)_v1b", r"resnet-\1"),
    (r"resnet", "resnet-50"),  # MLPerf's
    (r"(?:ig_|ssl_|swsl_|tv_|gluon_)?resnext101[-_](32x[48]d)", r"resnext-101-\1"),
    (r"vgg(16|19)", r"vgg-\1"),
    (r"vgg(16|19)_bn", r"vgg-\1-bn"),
    (r"(?:tv_|gluon_|adv_|tf_)?inception_v3", "inception-v3"),
    (r"(?:tv_)?densenet121", "densenet-121"),
    (r"mobilenetv2(?:_100)?", "mobilenet-v2"),
    (r"(?:tf_|efficientnet )?efficientnet[-_](b0|b4)(?:_ap|_ns)?", r"efficientnet-\1"),
)


def is_convnet(row: Row) -> bool:
    """Returns whether the row is of a class that may be a convolutional network."""
    return row.model_class in CLASSES


def map_convnet(row: Row) -> str:
    """Returns the catalog's name; Unsupported for another network."""
    name = row.model.strip().lower()
    for pattern, model in MODELS:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(model)
    spec = catalog_model(name)
    if spec is None or not is_conv_family(spec.family):
        raise Unsupported("this image model is not in the catalog")
    return spec.name


#: Frameworks whose networks launch the same convolutions of cuDNN; MXNet's fuse what follows them.
_SAME_KERNELS = ("tensorflow", "mindspore", "paddle")


def map_vision_stack(row: Row, precision: str, assumed: Assumed) -> str:
    """Returns the stack: channels last where the source says so, else PyTorch's default."""
    if not row.framework:
        raise Unsupported("the framework is not stated")
    timm = has_word(row.framework, "timm")
    if has_word(row.framework, *_SAME_KERNELS) and not has_word(row.framework, "mxnet", "pytorch"):
        stack = "pytorch-vision" if precision == "fp32" else "pytorch-vision-nhwc"
        assumed.add(f"stack: {row.framework.partition('/')[0]} as {stack}")
        return stack
    if not timm and not re.search(r"pytorch", row.framework, re.IGNORECASE):
        raise Unsupported(f"no stack is near the framework {row.framework!r} for images")
    if has_word(row.framework, "mxnet", "composer"):
        raise Unsupported(f"no stack is near the framework {row.framework!r} for images")
    if has_word(f"{row.notes} {row.precision}", "nhwc", "channels_last"):
        return "pytorch-vision-nhwc"
    if not timm and precision in ("fp16", "bf16"):
        assumed.add("channels first (not stated)")
    return "pytorch-vision"


def map_vision_precision(row: Row, device: Device, assumed: Assumed) -> str:
    """Returns the precision; fp32 is TF32 in convolutions of PyTorch where the device has it."""
    text = row.precision.lower()
    has_tf32 = device.supports("tf32")
    if re.search(r"bf16|bfloat16", text):
        return "bf16"
    if re.search(r"fp16|float16|\bamp\b|half|mixed", text):
        return "fp16"
    if "tf32" in text:
        return "tf32" if has_tf32 else "fp32"
    if row.family == "flagperf" and row.model.strip().lower() == "vit":
        # training/nvidia/vit-pytorch/config/config_common.py: amp = True
        assumed.add("precision = fp16 (fp32 in the source, whose configuration sets amp)")
        return "fp16"
    if re.search(r"fp32|float32", text):
        if has_tf32:
            assumed.add("precision = tf32 (fp32 in the source; cuDNN uses TF32 unless told not to)")
            return "tf32"
        return "fp32"
    raise Unsupported("the precision is not stated")


def map_vision_plan(row: Row) -> dict[str, Any]:
    """Returns data parallelism, the only plan of the sources."""
    if (row.tp or 1) > 1 or (row.pp or 1) > 1:
        raise Unsupported("model-parallel image models are not modelled")
    return {"preset": "plain" if row.n_gpus == 1 else "ddp", "tp": 1, "pp": 1}


def map_vision_training(row: Row, precision: str, assumed: Assumed) -> dict[str, Any]:
    """Returns the training section; Unsupported without a batch size."""
    if not row.gbs and not row.mbs:
        raise Unsupported("neither global batch nor micro-batch is stated")
    section: dict[str, Any] = {"precision": precision, "optimizer": "sgd-momentum"}
    pixels = first_number(r"^(\d+)", row.input_size)
    if pixels:
        section["image"] = int(pixels)
    else:
        assumed.add("image: usual for the model (not stated)")
    if row.gbs:
        section["global_batch"] = row.gbs
    if row.mbs:
        section["microbatch"] = row.mbs
    if "infer" in row.task.lower():
        raise Unsupported("inference is not modelled")
    return section
