"""Page-aligned buffers, as the host's memory hands them out (`tpi.devices.pages`): what direct reads go into."""

from tpi.devices.pages import PAGE, Bytes, page_buffer, round_up

__all__ = ["PAGE", "Bytes", "page_buffer", "round_up"]
