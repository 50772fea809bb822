"""Names of models over sources: what one source calls resnet50, another calls ResNet-50 v1.5."""

from __future__ import annotations

import re

from foretrain.validation.compare import Comparison
from foretrain.validation.mapping.vision import is_convnet, map_convnet
from foretrain.validation.mapping.vision_transformer import is_vit, vit_name
from foretrain.validation.mapping.words import Unsupported
from foretrain.validation.rows import Row

#: Classes of models that are listed one by one when they ran on one device.
SMALL = ("bert", "vision_cnn", "vision_cnn_or_vit", "vision_vit")


def model_of(item: Comparison) -> str:
    """Returns the name of the model of a row: the catalog's where it is known there."""
    row = item.row
    if is_vit(row):
        return vit_name(row)
    if is_convnet(row):
        return _convnet(row)
    if row.model_class == "bert":
        return re.sub(r"[ _]", "-", row.model.strip().lower())
    return row.model or "not stated"


def _convnet(row: Row) -> str:
    try:
        return map_convnet(row)
    except Unsupported:
        return row.model or "not stated"


def on_one_device(item: Comparison) -> bool:
    """Returns whether a row is a BERT, CNN or vision transformer on one device."""
    return item.row.n_gpus == 1 and item.row.model_class in SMALL
