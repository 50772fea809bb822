"""What the examples print: compared word for word, so that no change of a prediction goes unseen.

After a change that is meant, `FORETRAIN_UPDATE_GOLDEN=1 pytest tests/golden` writes the new texts;
the diff belongs to the change, with a line in CHANGELOG.md under "Accuracy".
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretrain.cli.main import main

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def golden_of(example: Path) -> Path:
    """examples/proteus/x.yaml -> tests/golden/proteus/x.out."""
    return HERE / example.relative_to(ROOT / "examples").with_suffix(".out")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_prints_what_it_did(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(example)]) in (0, 2)
    captured = capsys.readouterr()
    assert captured.err == ""
    golden = golden_of(example)
    if os.environ.get("FORETRAIN_UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(captured.out)
    assert captured.out.splitlines() == golden.read_text().splitlines()


def test_every_golden_text_has_its_example() -> None:
    assert EXAMPLES
    assert set(HERE.rglob("*.out")) == {golden_of(example) for example in EXAMPLES}


def test_readme_shows_what_the_demo_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(ROOT / "examples" / "llama3-70b-64xh100.yaml")]) == 0
    begin, end = "<!-- demo output: begin -->\n```text\n", "```\n<!-- demo output: end -->"
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(begin)
    shown, after = rest.split(end)
    printed = capsys.readouterr().out
    if os.environ.get("FORETRAIN_UPDATE_GOLDEN") == "1":
        readme.write_text(before + begin + printed + end + after)
        shown = printed
    assert shown.splitlines() == printed.splitlines()
