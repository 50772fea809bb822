"""Reading run files: values, lines, and one clear message for every kind of bad file."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrain.errors import FileFormatError
from foretrain.run.yaml_file import MAX_FILE_BYTES, parse_yaml, read_document

GOOD = """\
model: llama-3-8b
plan:
  tp: 4
  stages: [8, 8]
"""


def write(tmp_path: Path, content: str | bytes, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_values_and_lines(tmp_path: Path) -> None:
    document = read_document(write(tmp_path, GOOD))
    assert document.values == {"model": "llama-3-8b", "plan": {"tp": 4, "stages": [8, 8]}}
    assert document.lines["plan.tp"] == 3
    assert document.where("plan.tp").endswith("run.yaml:3: plan.tp")


def test_json_gives_the_same_values(tmp_path: Path) -> None:
    text = '{"model": "llama-3-8b",\n\t"plan": {"tp": 4, "stages": [8, 8]}}'
    path = write(tmp_path, text, "run.json")
    assert read_document(path).values == read_document(write(tmp_path, GOOD)).values


def test_keys_that_yaml_takes_for_booleans_stay_words() -> None:
    assert parse_yaml("on: 1\nno: off\n", "x")[0] == {"on": 1, "no": False}


def test_anchors_and_merges_are_resolved() -> None:
    text = "a: &base {tp: 2, pp: 4}\nb: {<<: *base, tp: 8}\n"
    assert parse_yaml(text, "x")[0]["b"] == {"tp": 8, "pp": 4}


def test_nested_aliases_are_built_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    value = parse_yaml("\n".join(lines), "x")[0]
    assert value["a29"][0] is value["a29"][8]


BAD_FILES = {
    "empty": ("", "the file is empty"),
    "blank": ("\n  \n", "the file is empty"),
    "only a comment": ("# nothing\n", "holds nothing"),
    "a list": ("- model\n", "holds a list"),
    "a text": ("hello", "holds a str"),
    "a tab": ("plan:\n\ttp: 4\n", ":2:1: a tab character, which YAML does not allow here"),
    "a key twice": (
        "plan:\n  tp: 1\n  pp: 2\n  tp: 4\n",
        ":4: plan.tp: given twice, first on line 2",
    ),
    "an open bracket": ("plan: [1, 2\n", "not valid YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "not valid YAML"),
    "an unknown tag": ("a: !!python/object:os.system x\n", "not valid YAML"),
    "a cycle": ("a: &a [*a]\n", "an alias that contains itself"),
    "a key that is a list": ("? [a, b]\n: 1\n", "a key must be a word"),
    "an impossible date": ("a: 2026-99-99\n", ":1: a: cannot read this value"),
    "binary": (b"\x80\x02}q\x00", "not a text file in UTF-8 (byte 1)"),
    "control characters": ("a: \x00\x01", "not a text file"),
    "too deep": ("[" * 5000, "nested too deeply"),
    "too large": ("#" * (MAX_FILE_BYTES + 1), "larger than 4 MiB"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[case]
    path = write(tmp_path, content)
    with pytest.raises(FileFormatError) as caught:
        read_document(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', ":2:7: not valid JSON"),
        ('{"a": 1, "a": 2}', "a: given twice"),
        ("[1]", "holds a list"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_json_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError) as caught:
        read_document(write(tmp_path, text, "run.json"))
    assert message in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="No such file"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(FileFormatError, match="a folder, not a run file"):
        read_document(tmp_path)


def test_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    assert read_document(write(tmp_path, b"\xef\xbb\xbfa: 1\n")).values == {"a": 1}
