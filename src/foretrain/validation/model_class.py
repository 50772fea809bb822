"""The class of a row's model, which decides how the row is mapped."""

from __future__ import annotations

from foretrain.errors import CatalogError
from foretrain.frontends.catalog import find_model
from foretrain.frontends.convnet_spec import is_conv_family
from foretrain.frontends.spec import Model

#: The classes that are mapped, as the column `model_class` names them.
MAPPED = ("llm_dense", "bert", "t5", "vision_cnn", "vision_vit", "recsys")
#: Families of the catalog that are no decoders.
_FAMILIES = {
    "bert": "bert",
    "roberta": "bert",
    "t5": "t5",
    "mt5": "t5",
    "vit": "vision_vit",
    "dlrm": "recsys",
}


def catalog_model(name: str) -> Model | None:
    """Returns the model that the catalog has under a name; None where it has none or several."""
    try:
        return find_model(name)
    except CatalogError:
        return None


def class_of(name: str, *, has_shape: bool) -> str:
    """Returns the class of a model of which only the name is stated; empty where that is unclear.

    A name that the catalog does not have is a dense decoder if its shape is given, unless the name
    says that it is an encoder.
    """
    model = catalog_model(name)
    if model is None:
        words = name.lower()
        if any(word in words for word in ("bert", "t5", "moe", "mixtral")) or not has_shape:
            return ""
        return "llm_dense"
    if is_conv_family(model.family):
        return "vision_cnn"
    return _FAMILIES.get(model.family, "llm_dense")
