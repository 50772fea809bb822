"""From the free text of a measured run to a run file: what it says, and what had to be assumed."""

from __future__ import annotations

from foretrain.validation.mapping.row import Mapped, map_row
from foretrain.validation.mapping.words import Unsupported

__all__ = ["Mapped", "Unsupported", "map_row"]
