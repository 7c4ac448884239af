"""The gateway's options of its network: certificates, a Unix socket in place of a port, and where
workers are found.

Their values are in the command's context, and become settings of its Config (`network_settings`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ownerserve.cli.options import Finite
from ownerserve.gateway.discovery.places import (
    parse_dns_place,
    parse_dns_server,
    parse_kubernetes_place,
)
from ownerserve.gateway.http.server_tls import TlsFiles
from ownerserve.kv.errors import InvalidInput
from ownerserve.kv.listening import parse_unix

F = TypeVar("F", bound=Callable[..., Any])
META = "ownerserve.gateway.network"
"""Where a command's context has the values."""
MODES = {"600": 0o600, "660": 0o660, "666": 0o666}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def keep(ctx: click.Context, option: click.Parameter, value: object) -> None:
    """Keep an option's value in its command's context."""
    ctx.meta.setdefault(META, {})[option.name] = value


def network_options(command: F) -> F:
    """Give a command the options of the gateway's listeners and of discovery."""
    kept: dict[str, Any] = {"expose_value": False, "callback": keep}
    command = _discovery_options(command, kept)
    for prefix, port in (("admin-", "admin port"), ("", "data port")):
        for option in (
            click.option(
                f"--{prefix}tls-client-ca-file",
                type=_FILE,
                help=f"PEM certificates of authorities: who comes to the {port} without a"
                " certificate of theirs is not answered.",
                **kept,
            ),
            click.option(
                f"--{prefix}tls-key-file",
                type=_FILE,
                help="Its key, not encrypted. Default: it is in the same file.",
                **kept,
            ),
            click.option(
                f"--{prefix}tls-cert-file",
                type=_FILE,
                help=f"PEM certificate, with its chain, for TLS (1.2 or later) at the {port}. A"
                " renewed one is in use within 2 s.",
                **kept,
            ),
        ):
            command = option(command)
    for option in (
        click.option(
            "--listen-mode",
            type=click.Choice(tuple(MODES)),
            default="600",
            show_default=True,
            help="Who may connect to the socket of --listen: its owner, its group too, or all.",
            **kept,
        ),
        click.option(
            "--listen",
            metavar="unix:///PATH",
            help="A Unix socket for the data port, in place of --host and --port.",
            **kept,
        ),
    ):
        command = option(command)
    return command


def _discovery_options(command: F, kept: dict[str, Any]) -> F:
    for option in (
        click.option(
            "--kubeconfig",
            type=_FILE,
            help="How the API server of Kubernetes is reached. Default: as a pod, with its service"
            " account, else by the user's own kubeconfig.",
            **kept,
        ),
        click.option(
            "--worker-kubernetes",
            metavar="NAMESPACE/SERVICE[:PORT]",
            multiple=True,
            help="A service of Kubernetes whose pods are workers: they join and leave with it, and"
            " those that are not ready get no new turn. https:// before it: by TLS. With"
            " =MODEL[,MODEL] as --worker. Needs ownerserve[kubernetes].",
            **kept,
        ),
        click.option(
            "--discovery-interval",
            "discovery_latest_s",
            type=Finite(min=1),
            default=30.0,
            show_default=True,
            metavar="SECONDS",
            help="A name is looked up again when its records have run out, and at the latest then.",
            **kept,
        ),
        click.option(
            "--dns-server",
            metavar="HOST[:PORT]",
            help="Who is asked for these names. Default: the system's servers.",
            **kept,
        ),
        click.option(
            "--worker-dns",
            "worker_dns",
            metavar="URL",
            multiple=True,
            help="A name whose addresses are workers, like http://vllm.internal:8000, or of a"
            " service (SRV), like http://_vllm._tcp.internal. They join and leave as it changes."
            " With =MODEL[,MODEL] as --worker. Needs ownerserve[dns].",
            **kept,
        ),
    ):
        command = option(command)
    return command


def network_settings() -> dict[str, Any]:
    """Return the settings of Config that the present command's options say. Raises InvalidInput."""
    said = click.get_current_context().meta[META]
    place, server = said["listen"], said["dns_server"]
    return {
        "places": (
            *(parse_dns_place(text) for text in said["worker_dns"]),
            *(parse_kubernetes_place(text) for text in said["worker_kubernetes"]),
        ),
        "kubeconfig": said["kubeconfig"],
        "discovery_latest_s": said["discovery_latest_s"],
        "dns_server": None if server is None else parse_dns_server(server),
        "unix": None if place is None else parse_unix(place, field="--listen"),
        "unix_mode": MODES[said["listen_mode"]],
        "tls": _tls_files(said, ""),
        "admin_tls": _tls_files(said, "admin_"),
    }


def _tls_files(said: dict[str, Any], prefix: str) -> TlsFiles | None:
    certificate = said[f"{prefix}tls_cert_file"]
    key, authorities = said[f"{prefix}tls_key_file"], said[f"{prefix}tls_client_ca_file"]
    option = f"--{prefix}tls-cert-file".replace("_", "-")
    if certificate is not None:
        return TlsFiles(certificate, key, authorities, option)
    if key is not None or authorities is not None:
        raise InvalidInput(option, "is missing", "name the certificate of that key, or for clients")
    return None
