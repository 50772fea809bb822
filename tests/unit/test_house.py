"""The house in order: pins agree with ranges, links lead somewhere, modules stay small."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from foretrain.run.aliases import PLAN_KEYS, SECTIONS, TRAINING_KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = dict(line.split("==") for line in lines if re.match(r"[A-Za-z]", line))
    return {canonicalize_name(package): version for package, version in found.items()}


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    core, ci = pins("core.txt"), pins("ci.txt")
    assert not core.keys() & ci.keys()
    wanted = {"core": project()["dependencies"], **extras}
    for group, requirements in wanted.items():
        have = core if group == "core" else {**core, **ci}
        for requirement in map(Requirement, requirements):
            version = have[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{group}: {requirement} {version}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    files = re.findall(r"`((?:src|tests|examples|benchmarks)/[\w./-]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in files if not (ROOT / name).exists()]
    assert not missing


def test_every_page_that_the_code_names_exists() -> None:
    sources = "".join(path.read_text() for path in ROOT.glob("src/**/*.py"))
    named = set(re.findall(r"docs/[\w/-]+\.md", sources))
    assert named
    assert not {page for page in named if not (ROOT / page).exists()}


@pytest.mark.parametrize("key", [*SECTIONS, *TRAINING_KEYS, *PLAN_KEYS])
def test_every_key_of_a_run_file_is_documented(key: str) -> None:
    assert f"`{key}`" in (ROOT / "docs/reference/run-file.md").read_text()


def test_modules_stay_below_the_hard_limit() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in ROOT.glob("src/**/*.py")
    }
    assert not {name: lines for name, lines in lengths.items() if lines > 600}
