"""Proxies of the environment: which one a request passes, by the same rules for every client.

Clients differ: one ignores `NO_PROXY=host:port` and `*`, one ranges of addresses, one the variables altogether.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import urlsplit


class Proxy(NamedTuple):
    """A proxy and the variable that names it.

    Attributes:
        url: Its address, with a scheme; it may hold a password.
        variable: The environment variable.
    """

    url: str
    variable: str

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]} ({self.variable})"


def named(url: str) -> Proxy | None:
    """Returns the proxy that the environment names for an address, whatever `NO_PROXY` says."""
    for name in (f"{urlsplit(url).scheme}_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if proxy := os.environ.get(variable):
                return Proxy(proxy if "://" in proxy else f"http://{proxy}", variable)
    return None


def told(url: str) -> str | None:
    """Returns a line on which proxy is asked, None where the environment names none."""
    if named(url) is None:
        return None
    proxy = applies(url)
    return f"{url} is asked {f'through {proxy}' if proxy else 'straight, by NO_PROXY'}"


def applies(url: str) -> Proxy | None:
    """Returns the proxy that a request to an address passes, None where it goes straight."""
    proxy = named(url)
    if proxy is None:
        return None
    from urllib.request import proxy_bypass  # both for those alone who have a proxy

    from requests.utils import should_bypass_proxies

    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    # The first knows ranges of addresses, the second a port beside an address and where none is written.
    is_straight = should_bypass_proxies(url, no_proxy=None) or proxy_bypass(f"{parts.hostname}:{port}")
    return None if is_straight else proxy
