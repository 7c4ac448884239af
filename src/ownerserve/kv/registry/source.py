"""A model's configuration comes from a config.json, a TOML file, a checkpoint folder, or the name
of one of the examples that ship with the project.
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
SUFFIXES = (".json", ".toml")


def example_names() -> tuple[str, ...]:
    """Return the names of the shipped examples, sorted."""
    found = {path.stem for f in EXAMPLE_FOLDERS for kind in SUFFIXES for path in f.glob(f"*{kind}")}
    return tuple(sorted(found))


def find_config(name: str) -> Path:
    """Return the file that `name` means. Raises InvalidInput listing the examples."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    stem = name.removesuffix(".json")
    shipped = [f / f"{stem}{kind}" for f in EXAMPLE_FOLDERS for kind in SUFFIXES]
    for candidate in (path, *shipped):
        if candidate.is_file():
            return candidate
    raise InvalidInput(
        "CONFIG",
        f"{name!r} is no file, no folder with a config.json and no shipped example",
        f"pass a path or one of {', '.join(example_names())}",
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object, or the TOML document, in `path`. Raises InvalidInput when it can't be
    read."""
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, OSError) as error:
        raise InvalidInput(path.name, str(error), "pass a model's config.json") from error
