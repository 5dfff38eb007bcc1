"""The sender of a request: with whom places and pages are shared, and from whom cached prefixes are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Client:
    """The sender of one HTTP request. All requests that the engine makes of it have the same object.

    Attributes:
        name: of those who share places and pages as one: a key, or an address.
        salt: requests find each other's cached prefixes only if their salts are equal.
    """

    name: str = ""
    salt: bytes = b""
