"""Reading a YAML or JSON file: plain values, and the line on which each field stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from foretrain.errors import FileFormatError, Problem

#: A run file has a few dozen lines. A larger file is something else (a checkpoint, a log).
MAX_FILE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A mapping as given; `lines` maps a dotted path to its line, `name` is the file's name."""

    values: dict[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    name: str = ""

    def where(self, path: str) -> str:
        """Returns the place of a field for a message, e.g. 'run.yaml:3: plan.tp'."""
        line = self.lines.get(path)
        return f"{self.name}:{line}: {path}" if line and self.name else path


def read_document(path: Path) -> Document:
    """Returns the mapping of a YAML (or, by its suffix, JSON) file.

    Raises:
        FileFormatError: the file cannot be read, is no text, is not well formed (line and column
            named), is empty, is no mapping, or gives a key twice.
    """
    text = _read_text(path)
    name = str(path)
    if path.suffix.lower() == ".json":
        return Document(values=_mapping(_parse_json(text, name), name), name=name)
    values, lines = parse_yaml(text, name)
    return Document(values=_mapping(values, name), lines=lines, name=name)


def parse_yaml(text: str, name: str) -> tuple[Any, dict[str, int]]:
    """Returns the value of a YAML text and the line of every field.

    Raises:
        FileFormatError: the text is not well formed, or gives a key twice.
    """
    try:
        reader = _Reader(yaml.SafeLoader(text), name)
        value = reader.document()
    except yaml.MarkedYAMLError as error:
        raise FileFormatError(_yaml_problem(error, text, name)) from None
    except yaml.YAMLError as error:  # a control character: the reader knows no line
        what = f"not a text file: {str(error).splitlines()[0]}"
        raise FileFormatError(Problem(what=what, where=name)) from None
    except RecursionError:
        raise FileFormatError(Problem(what="nested too deeply", where=name)) from None
    if reader.problems:
        raise FileFormatError(reader.problems)
    return value, reader.lines


def parse_scalar(text: str, where: str) -> Any:
    """Returns the value of a flag or `--set` text, read as YAML; FileFormatError if malformed."""
    return parse_yaml(text, where)[0]


class _Reader:
    """Builds plain values from YAML nodes, so that lines and keys given twice are not lost."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.loader = loader
        self.name = name
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()  # nodes being built: an alias to one of them is a cycle
        self._built: dict[int, Any] = {}  # anchors are built once, however often they are used

    def document(self) -> Any:
        """Returns the value of the only document in the text (None if there is none)."""
        node = self.loader.get_single_node()
        return None if node is None else self.value(node, "")

    def value(self, node: yaml.Node, path: str) -> Any:
        """Returns the value of a node that stands at `path`."""
        key = id(node)
        if key in self._built:
            return self._built[key]
        if key in self._open:
            self._problem("an alias that contains itself", path, node)
            return None
        self._open.add(key)
        if isinstance(node, yaml.MappingNode):
            built: Any = self._mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            items = cast("list[yaml.Node]", node.value)
            built = [self.value(item, f"{path}[{i}]") for i, item in enumerate(items)]
        else:
            built = self._scalar(node, path)
        self._open.discard(key)
        self._built[key] = built
        return built

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        self._report_twice(node, path)
        self.loader.flatten_mapping(node)  # resolves the merge key "<<"
        result: dict[str, Any] = {}
        for key, item in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if not isinstance(key, yaml.ScalarNode):
                self._problem("a key must be a word", path, key)
                continue
            # the text as written: YAML reads the words on and no as booleans
            word = str(key.value)
            below = f"{path}.{word}" if path else word
            self.lines[below] = _line(key)
            result[word] = self.value(item, below)
        return result

    def _report_twice(self, node: yaml.MappingNode, path: str) -> None:
        first: dict[str, int] = {}
        for key, _ in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if not isinstance(key, yaml.ScalarNode):
                continue
            word = str(key.value)
            if word in first and word != "<<":
                below = f"{path}.{word}" if path else word
                self._problem(f"given twice, first on line {first[word]}", below, key)
            first.setdefault(word, _line(key))

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        try:
            return cast("Any", self.loader).construct_object(node)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            # a date of month 13, or a tag (!!int, !!bool) on a text it does not fit
            self._problem(f"cannot read this value: {error}", path, node)
            return None

    def _problem(self, what: str, path: str, node: yaml.Node) -> None:
        place = f"{self.name}:{_line(node)}"
        self.problems.append(Problem(what=what, where=f"{place}: {path}" if path else place))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _yaml_problem(error: yaml.MarkedYAMLError, text: str, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
    lines = text.splitlines()
    if mark is not None and mark.line < len(lines) and "\t" in lines[mark.line][: mark.column + 1]:
        return Problem(
            what="a tab character, which YAML does not allow here",
            where=f"{name}:{mark.line + 1}:{lines[mark.line].index(chr(9)) + 1}",
            way_out="indent with spaces",
        )
    return Problem(what=f"not valid YAML: {error.problem or error.context}", where=where)


def _read_text(path: Path) -> str:
    name = str(path)
    try:
        if path.is_dir():
            raise FileFormatError(Problem(what="a folder, not a run file", where=name))
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        what = f"cannot read the file: {reason or error}"
        raise FileFormatError(Problem(what=what, where=name)) from None
    if len(raw) > MAX_FILE_BYTES:
        what = f"larger than {MAX_FILE_BYTES // 2**20} MiB, so hardly a run file"
        raise FileFormatError(Problem(what=what, where=name))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not a text file in UTF-8 (byte {error.start + 1})"
        raise FileFormatError(Problem(what=what, where=name)) from None
    if not text.strip():
        way_out = "a run file gives at least model, training and cluster"
        raise FileFormatError(Problem(what="the file is empty", where=name, way_out=way_out))
    return text


def _parse_json(text: str, name: str) -> Any:
    twice: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                twice.append(key)
            result[key] = value
        return result

    try:
        value = json.loads(text, object_pairs_hook=build)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise FileFormatError(Problem(what=f"not valid JSON: {error.msg}", where=where)) from None
    except RecursionError:
        raise FileFormatError(Problem(what="nested too deeply", where=name)) from None
    except ValueError as error:  # a whole number of thousands of digits
        raise FileFormatError(Problem(what=f"cannot read: {error}", where=name)) from None
    if twice:
        raise FileFormatError([Problem(what="given twice", where=f"{name}: {k}") for k in twice])
    return value


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    kind = "nothing" if value is None else f"a {type(value).__name__}"
    raise FileFormatError(
        Problem(
            what=f"a run file is a mapping of fields, this file holds {kind}",
            where=name,
            allowed="model, training, plan, cluster, stack",
        )
    )
