"""A model's configuration comes from a config.json, a checkpoint folder, or the name of one of the
examples that ship with the project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ownerserve.kv.errors import InvalidInput

_PACKAGE = Path(__file__).resolve().parents[2]
EXAMPLE_FOLDERS = (
    _PACKAGE / "example_configs",  # in a wheel
    _PACKAGE.parents[1] / "examples" / "configs",  # in a checkout
)


def example_names() -> tuple[str, ...]:
    """Return the names of the shipped examples, sorted."""
    return tuple(sorted({path.stem for f in EXAMPLE_FOLDERS for path in f.glob("*.json")}))


def find_config(name: str) -> Path:
    """Return the file that `name` means. Raises InvalidInput listing the examples."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    shipped = [f / f"{name.removesuffix('.json')}.json" for f in EXAMPLE_FOLDERS]
    for candidate in (path, *shipped):
        if candidate.is_file():
            return candidate
    raise InvalidInput(
        "CONFIG",
        f"{name!r} is no file, no folder with a config.json and no shipped example",
        f"pass a path or one of {', '.join(example_names())}",
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises InvalidInput when it can't be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, OSError) as error:
        raise InvalidInput(path.name, str(error), "pass a model's config.json") from error
