"""The conversion of a node's figures to and from the messages in which it describes itself to a master."""

from dataclasses import replace
from math import inf

from scheduler.model.machine import (
    LAPTOP,
    Accelerator,
    DeviceLink,
    DiskRate,
    NodeMachine,
    Rates,
    good_piece,
    laptop_gpu,
)
from tpi.net.fields import Card, CardFigures, MachineSpeed


def card_figures(machine: NodeMachine) -> CardFigures | None:
    """Return the figures of a node and its first accelerator for a message; None without an accelerator."""
    host, device = machine.host, machine.accelerator
    if device is None:
        return None
    rates, link, bus = device.rates, device.link, 0.0 if machine.bus == inf else machine.bus
    return CardFigures(
        host.read, host.operations, host.start, machine.disk.read, bus,
        rates.read, rates.operations, rates.start, link.up, link.down, link.latency,
    )  # fmt: skip


def machine_from_message(memory: int, card: Card | None, speed: MachineSpeed | None) -> NodeMachine:
    """Return the machine that a node with `memory` bytes of RAM described.

    A laptop's figures replace missing ones and zeros.
    """
    machine = replace(LAPTOP, memory=memory, accelerator=None)
    if card is None:
        if speed is None or not (speed.read and speed.operations):
            return machine
        disk = DiskRate(speed.disk) if speed.disk else LAPTOP.disk
        return replace(machine, host=Rates(speed.read, speed.operations), disk=disk)
    if card.figures is not None and _all_positive(card.figures):
        machine = _with_figures(machine, card.figures, card)
    else:
        machine = replace(machine, accelerator=replace(laptop_gpu(), memory=card.memory, name=card.name))
    machine = machine.with_cards(lambda each: replace(each, shared=card.shared))
    there = machine.accelerator
    assert there is not None
    return replace(machine, more=tuple(replace(there, memory=size) for size in card.more))


def _with_figures(machine: NodeMachine, told: CardFigures, card: Card) -> NodeMachine:
    device = Accelerator(
        Rates(told.read, told.operations, told.start),
        card.memory,
        DeviceLink(told.up, told.down, told.latency, good_piece(told.up, told.latency)),
        card.name,
    )
    host, bus = Rates(told.host_read, told.host_operations, told.host_start), told.bus or inf
    return replace(machine, host=host, disk=DiskRate(told.disk), accelerator=device, bus=bus)


def _all_positive(told: CardFigures) -> bool:
    return min(told.host_read, told.host_operations, told.disk, told.read, told.operations, told.up, told.down) > 0
