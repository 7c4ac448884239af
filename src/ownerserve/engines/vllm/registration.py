"""This module tells vLLM our connector's name, by which its MultiConnector looks for a child's
class.

The entry point `vllm.general_plugins` calls it in every process of vLLM, and the connector's own
module once more, for a vLLM whose VLLM_PLUGINS leaves us out or that finds us by PYTHONPATH alone:
there the first record of counts would end the server.
"""

from __future__ import annotations

from ownerserve.engines.vllm import compat
from ownerserve.engines.vllm.flags import CONNECTOR, MODULE


def register() -> None:
    """Register the connector's class, to be imported when it is asked for. May be called again."""
    compat.register_connector(CONNECTOR, module=MODULE)
