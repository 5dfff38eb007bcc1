"""The memory of this machine and its workers, by which a quantisation of a model is chosen before it is downloaded."""

from collections.abc import Sequence
from contextlib import closing

from master.workers.asking import ask
from scheduler.free import default_budget
from tpi.keys.policy import KeyPolicy
from tpi.net.sockets import Net
from tpi.pack.library.quantisations import HouseMemory


def house_memory(own: int | None, addresses: Sequence[str], policy: KeyPolicy) -> HouseMemory:
    """Return the memory of this machine and of the workers that would serve it now.

    Args:
        own: bytes that this machine may use; None: its free memory.
        addresses: the addresses of the workers to ask.
        policy: the access policy, which has the keys for the connections.
    """
    with closing(Net(policy=policy)) as net:
        answers = [one.condition for one in ask(net, addresses) if not one.unwilling]
    others = [said.profile.memory_limit or said.profile.memory_free for said in answers if said is not None]
    return HouseMemory((own or default_budget()) + sum(others), 1 + len(others))
