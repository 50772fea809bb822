"""Runs the command line: python -m foretrain."""

from __future__ import annotations

from foretrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
