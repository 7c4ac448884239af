"""`ownerserve doctor` tells what is installed, reachable, misconfigured, and the mend."""

from ownerserve.cli.doctor.command import command

__all__ = ["command"]
