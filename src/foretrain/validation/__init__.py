"""Predicted against measured: whole training runs."""

from __future__ import annotations
