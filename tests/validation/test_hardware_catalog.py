"""The device files are what the script makes of the table of data sheet figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from foretrain.hardware import list_devices

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_reproduces_the_catalog(measurements: Path, tmp_path: Path) -> None:
    table = measurements / "specs" / "gpus.csv"
    script = ROOT / "studies" / "devices" / "make_devices.py"
    subprocess.run([sys.executable, script, table, tmp_path], check=True)
    catalog = ROOT / "src" / "foretrain" / "catalog"
    made = sorted((tmp_path / "devices").glob("*.toml"))
    assert {path.stem for path in made} == {device.name for device in list_devices()}
    for path in (*made, tmp_path / "prices.toml"):
        assert path.read_bytes() == (catalog / path.relative_to(tmp_path)).read_bytes(), path.name
