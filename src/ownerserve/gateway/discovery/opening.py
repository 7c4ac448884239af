"""Sources are opened by their places: the one place that knows which library each needs, imported
only here, since each is an extra."""

from __future__ import annotations

from ownerserve.gateway.config import Config
from ownerserve.gateway.discovery.places import DnsPlace, KubernetesPlace, Place
from ownerserve.gateway.discovery.watching import Source
from ownerserve.kv.errors import InvalidInput


def open_sources(config: Config) -> list[Source]:
    """Return the sources of a gateway's workers; nothing is asked yet. Raises InvalidInput where
    a library is missing, what it needs can't be read, or a place is named twice."""
    names = [place.source for place in config.places]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput("worker", f"{name} is given twice", "give it once")
    return [_opened(place, config) for place in config.places]


def _opened(place: Place, config: Config) -> Source:
    option, extra = {
        DnsPlace: ("--worker-dns", "dns"),
        KubernetesPlace: ("--worker-kubernetes", "kubernetes"),
    }[type(place)]
    try:
        if isinstance(place, KubernetesPlace):
            from ownerserve.gateway.discovery.kubernetes import KubernetesSource

            return KubernetesSource(place, kubeconfig=config.kubeconfig)
        from ownerserve.gateway.discovery.dns import DnsSource

        return DnsSource(place, latest_s=config.discovery_latest_s, server=config.dns_server)
    except ImportError as error:
        mend = f"pip install 'ownerserve[{extra}]'"
        raise InvalidInput(option, f"needs {error.name}", mend) from error
