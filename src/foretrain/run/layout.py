"""The short form of a plan: a preset, a layout such as 2M4P1D, or both."""

from __future__ import annotations

import re
from typing import Any

from foretrain.errors import Problem, nearest
from foretrain.strategy.plan import PRESETS

_LAYOUT = re.compile(r"(\d{1,9}[mpd])+", re.IGNORECASE)
_DEGREE = re.compile(r"(\d+)([mpd])", re.IGNORECASE)
_KEY = {"m": "tp", "p": "pp", "d": "dp"}


def parse_plan_text(text: str, where: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the plan keys of a short form: 2M4P1D is tp 2, pp 4, dp 1; a word is a preset."""
    plan: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        if word.lower() in PRESETS:
            found: list[tuple[str, Any]] = [("preset", word.lower())]
        elif _LAYOUT.fullmatch(word):
            found = [(_KEY[k.lower()], int(n)) for n, k in _DEGREE.findall(word)]
        else:
            found = []
            problems.append(
                Problem(
                    what="unknown word in the short form of a plan",
                    value=word,
                    where=where,
                    allowed="a layout such as 2M4P1D (tensor, pipeline, data), "
                    + ", ".join(PRESETS),
                    way_out=nearest(word, PRESETS),
                )
            )
        for key, value in found:
            if key in plan:
                problems.append(Problem(what=f"{key} is given twice", where=where, value=text))
            plan[key] = value
    return plan
