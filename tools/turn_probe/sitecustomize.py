"""A profile function in every thread of a process, for tools/turn_path.py.

Python imports this module at start where its folder stands on PYTHONPATH. While the file
$TURN_PROBE/on exists, the functions below $TURN_SOURCE that are called are noted: their files,
and the classes of ours among arguments that come from another file. When the file goes, what was
noted is written to $TURN_PROBE/<pid>-<number>.json, one for each time it stood.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("TURN_PROBE", "")
SOURCE = os.environ.get("TURN_SOURCE", "")
POLL_S = 0.002
RECORDS = ("__struct_fields__", "__dataclass_fields__", "_fields")

_files = set()
_records = set()
_ours = {}
_enabled = False


def _is_ours(code):
    known = _ours.get(code)
    if known is None:
        imported = code.co_name == "<module>" or "__qualname__" in code.co_names[:3]
        known = _ours[code] = code.co_filename.startswith(SOURCE) and not imported
    return known


def _note(frame, event, value):
    if not _enabled or event != "call":
        return
    code = frame.f_code
    if not _is_ours(code):
        return
    _files.add(code.co_filename)
    caller = frame.f_back
    if caller is not None and caller.f_code.co_filename == code.co_filename:
        return
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        kind = type(frame.f_locals.get(name))
        if kind.__module__.startswith("ownerserve.") and any(hasattr(kind, f) for f in RECORDS):
            _records.add(f"{kind.__module__}.{kind.__qualname__}")


def _watch(folder):
    global _enabled
    marker, ready = folder / "on", folder / f"{os.getpid()}.ready"
    number = 0
    while True:
        stands = marker.exists()
        if stands and not _enabled:
            _files.clear()
            _records.clear()
            _enabled = True
            ready.touch()
        elif _enabled and not stands:
            _enabled = False
            number += 1
            part = folder / f"{os.getpid()}-{number}.part"
            part.write_text(json.dumps({"files": sorted(_files), "records": sorted(_records)}))
            part.rename(part.with_suffix(".json"))
        time.sleep(POLL_S)


if FOLDER:
    threading.Thread(target=_watch, args=(Path(FOLDER),), daemon=True).start()
    sys.setprofile(_note)
    threading.setprofile(_note)
