"""foretrain: how fast a distributed training job will run, and whether it fits, without a GPU.

    import foretrain
    run = foretrain.load_run("run.yaml", overrides={"plan.tp": 4})
    result = foretrain.predict(run)

The public names load what they need on first use, so that the import itself is quick.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrain.errors import (
        CatalogError,
        FileFormatError,
        ForetrainError,
        InfeasibleError,
        InputError,
        InternalError,
        PlanError,
        Problem,
    )
    from foretrain.predict import predict
    from foretrain.run.load import load_run
    from foretrain.run.spec import RunSpec
    from foretrain.simulator.result import Result

__version__ = "0.1.0"

__all__ = [
    "CatalogError",
    "FileFormatError",
    "ForetrainError",
    "InfeasibleError",
    "InputError",
    "InternalError",
    "PlanError",
    "Problem",
    "Result",
    "RunSpec",
    "load_run",
    "predict",
]

#: Public name -> module that defines it.
_HOME = {
    "CatalogError": "foretrain.errors",
    "FileFormatError": "foretrain.errors",
    "ForetrainError": "foretrain.errors",
    "InfeasibleError": "foretrain.errors",
    "InputError": "foretrain.errors",
    "InternalError": "foretrain.errors",
    "PlanError": "foretrain.errors",
    "Problem": "foretrain.errors",
    "Result": "foretrain.simulator.result",
    "RunSpec": "foretrain.run.spec",
    "load_run": "foretrain.run.load",
    "predict": "foretrain.predict",
}


def __getattr__(name: str) -> Any:
    """Returns a public name, loaded on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'foretrain' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted([*__all__, "__version__"])


class _Package(ModuleType):
    """Keeps `foretrain.predict` the function: importing the module of that name would hide it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "predict" and isinstance(value, ModuleType):
            value = value.predict
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
