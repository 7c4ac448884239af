"""A Ctrl-C ends a command whenever it comes."""

from __future__ import annotations

import subprocess
import sys

HOLDING = """
import os, signal, time
import click
from ownerserve.cli import main

class Ends:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass  # here Python raises, and drops it

@click.command()
def hold():
    Ends()
    print("went on", flush=True)
    time.sleep(20)

signal.signal(signal.SIGINT, signal.default_int_handler)
main.cli = hold
main.main([])
"""


def test_one_that_python_drops_is_not_lost() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HOLDING], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (130, "went on\n")
    assert ended.stderr.split() == ["interrupted"]
