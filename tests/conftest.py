"""Fixtures for all tests: where the measured data lies, and how hypothesis searches.

`../shared` (next to the checkout) holds third-party measurements that do not belong to the
package. A test that needs it asks for the fixture `shared`; where the folder is absent the test is
skipped with that reason, or fails when FORETRAIN_REQUIRE_SHARED=1 (as CI sets it).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# One fixed search by default, so that a red run is red again; HYPOTHESIS_PROFILE=explore looks
# further, with fresh seeds. No deadline: a busy machine is not a failing test.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def require_shared(relative: str = "") -> Path:
    """Returns a path below ../shared; skips (or fails, see above) where it does not exist."""
    path = SHARED / relative
    if path.exists():
        return path
    reason = f"needs ../shared/{relative}, measured data that is not part of the package"
    if os.environ.get("FORETRAIN_REQUIRE_SHARED") == "1":
        pytest.fail(f"{reason}; FORETRAIN_REQUIRE_SHARED=1", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def shared() -> Path:
    """The folder ../shared."""
    return require_shared()


@pytest.fixture
def examples() -> Path:
    """The folder of example run files."""
    return ROOT / "examples"
