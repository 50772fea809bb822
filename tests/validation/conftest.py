"""Everything in tests/validation compares with measurements: marked, and in need of ../shared."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder; the hook sees the items of all folders."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.validation)


@pytest.fixture
def measurements(shared: Path) -> Path:
    """The folder ../shared/data."""
    return shared / "data"
