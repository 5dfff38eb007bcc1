"""The sender of a request, between which places, pages and cached prefixes are shared."""

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Client:
    """The sender of one HTTP request. All engine requests made for it share the same object.

    Attributes:
        name: a key or an address. Requests with the same name share one client's places and pages.
        salt: two requests can reuse each other's cached prefixes only if their salts are equal.
    """

    name: str = ""
    salt: bytes = b""
