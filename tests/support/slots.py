"""A check of the index of slots."""

from typing import Any

import numpy as np

from scheduler.slots.table import SlotTable


def table_faults(table: SlotTable[Any]) -> list[str]:
    """Return descriptions of contradictions in the index of slots."""
    slots, units = np.flatnonzero(table.unit_of >= 0), np.flatnonzero(table.slot_of >= 0)
    wrong = []
    if len(slots) != len(units) or (table.slot_of[table.unit_of[slots]] != slots).any():
        wrong.append("a unit is in two slots, or a slot has two units")
    if (table.pins < 0).any() or table.pins[table.unit_of < 0].any():
        wrong.append("an empty slot is pinned, or one was released twice")
    if table.none_failed and table.failed.any():
        wrong.append("a slot has failed, and holds do not know")
    if (table.loading & table.failed).any() or (table.failed & (table.pins == 0)).any():
        wrong.append("a slot that is not in use has failed")
    if table.loading[table.unit_of < 0].any():
        wrong.append("an empty slot is loading")
    return wrong
