"""Transfer engines of other makers are imported here, by the name of their road. Each is an extra
of ours; what they load may be missing from the system too.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from ownerserve.kv.errors import InvalidInput

MODULES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}
FIELD = "transfer-roads"
MISSING_LIBRARY = re.compile(r"(lib\S+\.so\S*): cannot open shared object file")


def load_engine(road: str) -> Any:
    """Return the module of the road's engine. Raises InvalidInput where its package, or a library
    that it needs, is not installed."""
    try:
        return import_module(MODULES[road])
    except ImportError as error:
        lacks = MISSING_LIBRARY.search(str(error))
        mend = f"pip install 'ownerserve[{road}]'"
        if lacks:
            mend = f"install the system's package of {lacks[1]}"
        raise InvalidInput(FIELD, f"{road} needs its package ({error})", mend) from error
