"""`ownerserve demo` runs the whole path on this machine, once for each policy."""

from ownerserve.cli.demo.command import command

__all__ = ["command"]
