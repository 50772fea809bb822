"""Predicted against measured: collectives."""

from __future__ import annotations
