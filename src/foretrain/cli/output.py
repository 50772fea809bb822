"""Where results go: standard output that may close early, and files that appear whole or not."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretrain.errors import InputError, Problem


class Finished(Exception):  # noqa: N818 - no error: how a command says its exit code
    """Ends a command with an exit code."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"exit code {code}")


def emit(text: str) -> None:
    """Prints a text; a reader that has gone away (`| head`) is no error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a file name may hold what no terminal shows
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit: let that go nowhere
        _silence()
    except (OSError, AttributeError) as error:  # a full disk, or no standard output at all
        if isinstance(error, OSError):
            _silence()
        reason = getattr(error, "strerror", None) or "it is closed"
        raise InputError(Problem(what=f"cannot write: {reason}", where="standard output")) from None


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=sys.stderr)


def check_target(target: str | None, option: str) -> None:
    """Raises InputError when `target` cannot be written; asked before any work is done."""
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        reason = _why_not(path)
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
        reason = str(getattr(error, "strerror", None) or error)
    if reason:
        raise InputError(Problem(what=f"cannot write: {reason}", where=option, value=target))


def _why_not(path: Path) -> str:
    if path.exists() and not path.is_file() and not path.is_dir():
        return ""
    folder = path.parent
    if path.is_dir():
        return "is a folder"
    if not folder.is_dir():
        return f"the folder {str(folder)!r} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {str(folder)!r} cannot be written"
    return ""


def refuse_foreign(kind: str, options: Mapping[str, object]) -> None:
    """Raises InputError for options that were given and that this kind does not read."""
    given = [name for name, value in options.items() if value not in (None, False, "all")]
    if given:
        what = f"not an option of {kind}: nothing would read it"
        raise InputError([Problem(what=what, where=name, way_out="leave it out") for name in given])


def json_text(value: dict[str, Any]) -> str:
    """Returns strict JSON (no NaN), indented."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Writes a file whole or not at all: into a temporary file beside it, then renamed."""
    part: Path | None = None
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        part = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(path)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        what = f"cannot write: {error.strerror or error}"
        raise InputError(Problem(what=what, where=str(path))) from None
