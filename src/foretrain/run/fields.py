"""From what was given (file, flags, --set) to plain sections with our own key names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from foretrain.errors import FileFormatError, InputError, Problem, nearest
from foretrain.run import aliases
from foretrain.run.foreign_words import expand
from foretrain.run.layout import parse_plan_text
from foretrain.run.yaml_file import Document, parse_scalar

#: Fields that are plain text: a flag or --set is not read as YAML, unless it is a mapping.
TEXT_FIELDS = ("model", "cluster", "stack")


@dataclass(slots=True, kw_only=True)
class Fields:
    """The sections of a run; `places` says where a field came from, for messages.

    `model_changes` are `--set model.layers=4` on a model given by name.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[str, str] = field(default_factory=dict[str, str])
    model_changes: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[Problem] = field(default_factory=list[Problem])
    kinds: list[type[InputError]] = field(default_factory=list[type[InputError]])

    def refuse(self, problems: Sequence[Problem], kind: type[InputError] = InputError) -> None:
        """Adds problems; `kind` is the error that they are raised as when there are no others."""
        self.problems += problems
        self.kinds += [kind] * len(problems)

    def error(self) -> InputError:
        """Returns one error with all problems, each at the place where its field was given."""
        placed = [replace(p, where=self.place(p.where)) for p in self.problems]
        unique = [p for i, p in enumerate(placed) if p not in placed[:i]]
        same = len(self.kinds) == len(self.problems) and len(set(self.kinds)) == 1
        return (self.kinds[0] if same else InputError)(unique)

    def section(self, name: str) -> dict[str, Any]:
        """Returns the mapping of a section, made on first use."""
        return cast("dict[str, Any]", self.values.setdefault(name, {}))

    def place(self, path: str) -> str:
        """Returns where a field came from, or its path when nothing better is known."""
        return self.places.get(path, path)


def collect_fields(
    document: Document,
    flags: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | Sequence[str],
) -> Fields:
    """Returns the sections of a document with flags, then overrides, laid over it."""
    fields = Fields()
    _read_sections(fields, document)
    for key, value in (flags or {}).items():
        if value is not None:
            path = key if key.split(".")[0] in aliases.SECTIONS else aliases.home(key) or key
            _set(fields, path, _parsed(fields, path, value, f"--{key}"), f"--{_flag(key)}")
    for path, value in _override_items(fields, overrides):
        _set(fields, path, _parsed(fields, path, value, f"--set {path}"), f"--set {path}")
    return fields


def _flag(key: str) -> str:
    return key.rsplit(".", 1)[-1].replace("_", "-")


def _read_sections(fields: Fields, document: Document) -> None:
    for key, value in document.values.items():
        word = aliases.plain(str(key))
        if word not in aliases.SECTIONS:
            fields.problems.append(_unknown_section(document, str(key), value))
        elif value is None:
            continue
        elif word in aliases.KEYS:
            fields.places[word] = document.where(str(key))
            _read_keys(fields, document, word, str(key), value)
        else:
            fields.values[word] = value
            fields.places[word] = document.where(str(key))


def _unknown_section(document: Document, key: str, value: Any) -> Problem:
    home = aliases.home(key)
    hint = aliases.HINTS[""].get(aliases.plain(key), "")
    if home and "." in home:
        hint = f"write it as {home}"
    shown = None if isinstance(value, Mapping | list) else value
    return Problem(
        what=f"unknown key {key!r}",
        where=document.where(key),
        value=shown,
        allowed=", ".join(aliases.SECTIONS),
        way_out=hint or nearest(key, aliases.SECTIONS),
    )


def _read_keys(fields: Fields, document: Document, section: str, given: str, value: Any) -> None:
    if isinstance(value, str) and section == "plan":
        value = parse_plan_text(value, fields.place(section), fields.problems)
    if not isinstance(value, Mapping):
        fields.problems.append(
            Problem(
                what="must be a mapping of fields",
                where=fields.place(section),
                value=value,
                allowed=", ".join(aliases.KEYS[section]),
            )
        )
        return
    words = {aliases.plain(str(k)): v for k, v in cast("Mapping[Any, Any]", value).items()}
    for key, item in cast("Mapping[str, Any]", value).items():
        place = document.where(f"{given}.{key}")
        name = _known(fields, section, str(key), place)
        if name is None or item is None:
            continue
        parts = _expanded(fields, section, str(key), name, item, words, place)
        for part, own in parts.items():
            path = _beside(fields, f"{section}.{part}", own)
            inside = "." in part and _stored(fields, path) is not None
            if inside or fields.places.get(path, place) != place:
                if (len(parts) > 1 or own is not item) and _stored(fields, path) == own:
                    continue  # two words of a tool that say the same
                what = f"{part} is given twice, as {key!r} and under another name"
                fields.problems.append(Problem(what=what, where=place, value=item))
                break
            _put(fields, path, own, place)


def _expanded(
    fields: Fields,
    section: str,
    key: str,
    name: str,
    value: Any,
    beside: Mapping[str, Any],
    place: str,
) -> Mapping[str, Any]:
    """What a key sets: the field of its name, or those that a word of another tool stands for."""
    found = expand(section, aliases.plain(key), value, beside, place)
    if isinstance(found, Problem):
        fields.problems.append(found)
        return {}
    begun = fields.section(section).get(name)
    both = isinstance(begun, Mapping) and isinstance(value, Mapping)
    if found is None and name in _WORD_KEY and both:
        # a role of precision stood before the mapping of roles
        inner = cast("Mapping[str, Any]", value)
        return {f"{name}.{word}": item for word, item in inner.items()}
    return {name: value} if found is None else found


def _stored(fields: Fields, path: str) -> Any:
    section, key, *rest = path.split(".")
    value: Any = fields.section(section).get(key)
    for part in rest:
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value


def _beside(fields: Fields, path: str, item: object) -> str:
    """The path of a word whose mapping another key has begun: recompute_modules stood first."""
    section, name, *rest = path.split(".")
    word, begun = _WORD_KEY.get(name), fields.section(section).get(name)
    if rest or not word or not isinstance(begun, Mapping) or isinstance(item, Mapping):
        return path
    return path if word in begun else f"{path}.{word}"


def _known(fields: Fields, section: str, key: str, place: str) -> str | None:
    name = aliases.canonical(section, key)
    if name is None:
        hint = aliases.HINTS[section].get(aliases.plain(key), "")
        other = aliases.home(key)
        if not hint and other:
            hint = f"it belongs to {other.split('.')[0]}: write it as {other}"
        known = [*aliases.KEYS[section], *aliases.ALIASES[section]]
        fields.problems.append(
            Problem(
                what=f"unknown key {key!r}",
                where=place,
                allowed=", ".join(aliases.KEYS[section]),
                way_out=hint or nearest(aliases.plain(key), known),
            )
        )
    return name


def _override_items(
    fields: Fields, overrides: Mapping[str, Any] | Sequence[str]
) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    items: list[tuple[str, Any]] = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        path, sign, value = text.partition("=")
        if not sign or not path.strip():
            what = "an override is written FIELD=VALUE, e.g. plan.tp=4"
            fields.problems.append(Problem(what=what, where="--set", value=text))
            continue
        items.append((path.strip(), value.strip()))
    return items


def _parsed(fields: Fields, path: str, value: Any, where: str) -> Any:
    """Texts are read as YAML, so that 4 is a number and [1, 2] a list."""
    if not isinstance(value, str) or (path in TEXT_FIELDS and not value.lstrip().startswith("{")):
        return value
    try:
        return parse_scalar(value, where)
    except FileFormatError as error:
        fields.problems += error.problems
        return None


def _set(fields: Fields, path: str, value: Any, place: str) -> None:
    """Lays one value over what the file says; an unknown path is a problem."""
    section, _, key = path.partition(".")
    section = aliases.plain(section)
    if section not in aliases.SECTIONS:
        home = aliases.home(path)
        paths = [f"{name}.{key}" for name, keys in aliases.KEYS.items() for key in keys]
        way_out = f"did you mean {home!r}?" if home else nearest(path, [*paths, *aliases.SECTIONS])
        what = f"unknown field {path!r}"
        allowed = "model, cluster, stack, training.FIELD, plan.FIELD"
        fields.problems.append(Problem(what=what, where=place, allowed=allowed, way_out=way_out))
    elif not key and section == "plan" and isinstance(value, str):
        for name, item in parse_plan_text(value, place, fields.problems).items():
            _put(fields, f"plan.{name}", item, place)
    elif not key and section in aliases.KEYS:
        what = f"set one field of {section}, e.g. {section}.{aliases.KEYS[section][0]}"
        fields.problems.append(Problem(what=what, where=place, value=value))
    elif not key:
        fields.values[section] = value
        fields.places[section] = place
    elif section in aliases.KEYS:
        head, _, rest = key.partition(".")
        name = _known(fields, section, head, place)
        if name is not None and rest:
            _put(fields, f"{section}.{name}.{rest}", value, place)
        elif name is not None:
            words = {aliases.plain(head): value}
            parts = _expanded(fields, section, head, name, value, words, place)
            for part, own in parts.items():
                _put(fields, f"{section}.{part}", own, place)
    else:
        _set_inside(fields, section, key, value, place)


def _set_inside(fields: Fields, section: str, key: str, value: Any, place: str) -> None:
    """A field of the model or the cluster: in an inline mapping, or on a model given by name."""
    target = fields.values.get(section)
    if isinstance(target, Mapping):
        fields.values[section] = {**cast("Mapping[str, Any]", target), key: value}
        fields.places[f"{section}.{key}"] = place
    elif section == "model" and target is not None:
        fields.model_changes[key] = value
        fields.places[f"model.{key}"] = place
    else:
        what = f"{section} has no fields here: it is given as a name"
        way_out = f"set {section} itself"
        fields.problems.append(Problem(what=what, where=place, value=value, way_out=way_out))


def _put(fields: Fields, path: str, value: Any, place: str) -> None:
    """Stores a value at section.key or, for mappings, at section.key.rest."""
    section, key, *rest = path.split(".")
    target = fields.section(section)
    fields.places[path] = place
    if not rest:
        target[key] = value
        return
    inner = _as_mapping(key, target.get(key))
    if key == "overrides" and len(rest) > 1:  # the pattern of an override has dots of its own
        pattern, setting = ".".join(rest[:-1]), rest[-1]
        inner[pattern] = {**inner.get(pattern, {}), setting: value}
    else:
        inner[".".join(rest)] = value
    target[key] = inner
    fields.places.setdefault(f"{section}.{key}", place)


#: Fields that are a word or a mapping: what the word means as a mapping.
_WORD_KEY = {"recompute": "mode", "precision": "compute"}


def _as_mapping(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    if value is None:
        return {}
    if key in _WORD_KEY:
        return {_WORD_KEY[key]: value}
    return (
        dict.fromkeys(("grad", "param", "tp", "p2p", "tables"), value) if key == "overlap" else {}
    )
