"""Models by name, by file and inline: everything that ends in a ModelSpec, a ConvSpec or a RecSpec.

The catalog's models are data: src/foretrain/catalog/models/*.toml, one `[[model]]` table each.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from foretrain.errors import CatalogError, InputError, InternalError, Problem, nearest
from foretrain.frontends.convnet_spec import conv_spec_from_mapping, is_conv_family
from foretrain.frontends.families import model_from_mapping
from foretrain.frontends.hf_config import load_hf_config, model_from_hf_mapping
from foretrain.frontends.model_file import ABOUT, ENDINGS, read_model_file
from foretrain.frontends.recsys_spec import is_rec_family, rec_spec_from_mapping
from foretrain.frontends.spec import Model

#: Endings of checkpoint names that do not change the shape of a model.
_SAME_SHAPE = frozenset({"hf", "instruct", "chat", "base", "it", "meta"})
_TOKEN = re.compile(r"\d+(?:\.\d+)?(?:[bmt](?![a-z0-9]))?|[a-z]+")


def list_models() -> tuple[Model, ...]:
    """Returns every model of the catalog, in order of name."""
    return tuple(spec for _, spec in sorted(_entries().items()))


def aliases() -> Mapping[str, str]:
    """Returns the names people type besides the catalog's own -> the catalog's name."""
    return {alias: name for alias, name in _names().items() if alias != name}


#: Share of letters in common from which the first word of a name may be a misspelt one.
ALIKE = 0.75
_LIST = "`foretrain catalog models`"
#: Names of models that no stage knows -> what they are: 8x7b and a3b (active parameters) by form.
NOT_MODELLED = {
    r".*\d+x\d+|.*-a\d+(\.\d+)?b\b|.*moe|deepseek-[vr]\d|dbrx|grok|gpt-oss|arctic|llama-4|kimi|"
    r"minimax|switch": "mixture-of-experts",
    r".*mamba|zamba|jamba|rwkv": "state-space and recurrent",
    r"stable-diffusion|sdxl|flux|dit-": "diffusion",
}


def find_model(name: str) -> Model:
    """Returns the model called `name`.

    Case, separators, the owner before "/" and endings such as -instruct or -hf are ignored.
    Raises CatalogError with the candidates for a name that is unknown or fits several models.
    """
    wanted = _tokens(name)
    found = sorted({full for key, full in _names().items() if _tokens(key) == wanted})
    if len(found) == 1:
        return _entries()[found[0]]
    raise CatalogError(_unknown(name, wanted, found))


def _unknown(name: str, wanted: tuple[str, ...], found: list[str]) -> Problem:
    """Returns what is wrong with a name that fits no model, or several (`found`)."""
    near = found or sorted(
        {full for key, full in _names().items() if wanted and set(wanted) <= set(_tokens(key))}
    )
    if len(near) > 1:
        return Problem(
            what="ambiguous model name", where="model", value=name, allowed=", ".join(near)
        )
    short = name.lower().rpartition("/")[2]
    kind = next((kind for form, kind in NOT_MODELLED.items() if re.match(form, short)), "")
    if kind and not found:
        what = f"{kind} models come with a later version"
        return Problem(what=what, where="model", value=name, way_out=f"{_LIST} lists what there is")
    alike = {known for known in _names() if _same_family(known, short)}
    hint = f"did you mean {near[0]!r}?" if near else nearest(name, alike)
    ways = f"{_LIST} lists all; a Hugging Face config.json or an inline model"
    return Problem(
        what="unknown model",
        where="model",
        value=name,
        way_out=f"{hint} {ways} ({{family: ..., layers: ...}}) will do as well".strip(),
    )


def _same_family(one: str, other: str) -> bool:
    """Whether the letters that two names begin with are alike, a slip of the pen apart."""
    first, second = (re.sub(r"[^a-z].*", "", name.lower()) for name in (one, other))
    return SequenceMatcher(None, first, second).ratio() >= ALIKE


def resolve_model(value: object, *, folder: Path | None = None) -> Model:
    """Returns the model that a run file's `model` means: a text, a Path or a mapping.

    A mapping is an inline model (with `model_type`: the content of a Hugging Face config); a file
    that ends in .toml, .yaml or .yml holds the same fields; another Path, or a text that ends in
    .json or names an existing file, is a config.json; files are read relative to `folder`. Any
    other text is a catalog name. Raises InputError (CatalogError, FileFormatError).
    """
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        if "model_type" in mapping:
            return model_from_hf_mapping(mapping, name="inline", where="model")
        return _from_mapping(mapping, "model")
    if not isinstance(value, str | Path) or not str(value).strip():
        raise InputError(
            Problem(
                what="not a model",
                where="model",
                value=value,
                allowed="a catalog name, a config.json, a TOML or YAML file, or a mapping",
            )
        )
    path = _path(value, folder)
    if path.suffix.lower() in ENDINGS:
        return _from_file(path)
    if isinstance(value, Path) or value.lower().endswith(".json"):
        return load_hf_config(path)
    try:
        return find_model(value)
    except CatalogError:
        # a name of the catalog wins over a folder of the same name beside the run file
        if value.startswith((".", "/", "~")) or _exists(path):
            return load_hf_config(path)
        raise


def _from_mapping(mapping: Mapping[str, Any], where: str) -> Model:
    if is_conv_family(mapping.get("family")):
        return conv_spec_from_mapping(mapping, where=where)
    if is_rec_family(mapping.get("family")):
        return rec_spec_from_mapping(mapping, where=where)
    return model_from_mapping(mapping, where=where)


def _from_file(path: Path) -> Model:
    """The model of a file; problems name the file."""
    fields = read_model_file(path)
    return _from_mapping({"name": path.stem, **fields}, str(path))


def _path(value: str | Path, folder: Path | None) -> Path:
    path = Path(value)
    with suppress(RuntimeError):  # "~name" of nobody stays as it is
        path = path.expanduser()
    return path if folder is None else folder / path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def _tokens(name: str) -> tuple[str, ...]:
    """Returns what a name says: "meta-llama/Llama-3.1-70B-Instruct" -> llama, 3.1, 70b."""
    words: list[str] = _TOKEN.findall(name.strip().rsplit("/", 1)[-1].lower())
    return tuple(word for word in words if word not in _SAME_SHAPE)


@cache
def _tables() -> tuple[Mapping[str, Any], ...]:
    folder = resources.files("foretrain.catalog") / "models"
    tables: list[Mapping[str, Any]] = []
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            tables += tomllib.loads(file.read_text(encoding="utf-8"))["model"]
    return tuple(tables)


@cache
def _entries() -> Mapping[str, Model]:
    entries: dict[str, Model] = {}
    for table in _tables():
        if table["name"] in entries:
            raise InternalError(f"the catalog has two models {table['name']!r}")
        shape = {key: value for key, value in table.items() if key not in ABOUT}
        spec = _from_mapping(shape, f"catalog {table['name']}")
        entries[table["name"]] = replace(
            spec,
            assumed=(),  # what a file of the catalog leaves to the family is stated, not guessed
            num_parameters=table.get("num_parameters"),
            source=table["source"],
        )
    return entries


@cache
def _names() -> Mapping[str, str]:
    names: dict[str, str] = {}
    for table in _tables():
        for key in (table["name"], *table.get("aliases", ())):
            names[key] = table["name"]
    return names
