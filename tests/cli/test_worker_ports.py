"""A worker's ports are looked at before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zmq

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
from ownerserve.cli.main import main
sys.argv = ["ownerserve", "worker", "--rpc-port", sys.argv[1]]
sys.exit(main())
"""


def test_a_taken_rpc_port_is_one_error_line_before_the_model_is_loaded() -> None:
    pytest.importorskip("uvicorn")
    taken = zmq.Context.instance().socket(zmq.REP)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        told = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        taken.close(0)
    assert told.returncode == 2
    (line,) = told.stderr.strip().splitlines()
    assert line.startswith(f"error: rpc port: 127.0.0.1:{port}: Address already in use"), line
