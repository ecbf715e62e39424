"""Addresses as users write them."""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv6Address


def pre_handle_ip(address: str | None) -> tuple[str, Exception | None]:
    """The address ready for `host:port` (IPv6 in brackets), or an empty text and the reason."""
    if not address:
        return "", ValueError("the address is empty")
    if not isinstance(address, str):
        return "", ValueError(f"{address!r} is no text")
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    try:
        IPv4Address(bare)
    except AddressValueError:
        pass
    else:
        return bare, None
    try:
        IPv6Address(bare)
    except AddressValueError:
        return "", ValueError(f"{address!r} is neither an IPv4 nor an IPv6 address")
    return f"[{bare}]", None
