"""A worker that sends any messages a test sets: a thread of the test's process behind real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import zmq

from tpi import __version__
from tpi.net.channel import Channel, UnreachableError
from tpi.net.fields import Profile
from tpi.net.messages import Hello, Join
from tpi.net.sockets import CONTROL, WEIGHTS, Net

Say = Callable[["Hostile", object], list[object]]  # what it answers to a message of the master


@dataclass
class Hostile:
    """The worker's two planes. `says` answers control messages; `needs` answers messages on the weights plane."""

    says: Say
    needs: Say
    name: str = "stranger"
    memory: int = 1 << 30
    net: Net = field(default_factory=Net)
    received: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        control, self.port = self.net.bind(CONTROL, "127.0.0.1", 0)
        weights, self.weights_port = self.net.bind(WEIGHTS, "127.0.0.1", 0)
        self.control, self.weights = Channel(control), Channel(weights)
        self._over = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serve(self) -> None:
        poller = zmq.Poller()
        for channel in (self.control, self.weights):
            poller.register(channel.socket, zmq.POLLIN)
        while not self._over.is_set():
            poller.poll(20)
            for channel, say in ((self.control, self._controls), (self.weights, self.needs)):
                while (found := channel.receive()) is not None:
                    peer, message = found
                    self.received.append(message)
                    for answer in say(self, message):
                        with suppress(UnreachableError):  # the asker may have gone
                            channel.send(answer, peer)

    def stop(self) -> None:
        self._over.set()

    def _controls(self, _: "Hostile", message: object) -> list[object]:
        if isinstance(message, Join):
            return [self.hello(message.session)]
        return self.says(self, message)

    def hello(self, session: int) -> Hello:
        profile = Profile("h", "Linux", 1, 1, self.memory, self.memory, self.memory, 1 << 20, 1 << 40)
        return Hello(__version__, session, self.name, self.port, self.weights_port, profile)


def silent(_: Hostile, message: object) -> list[object]:
    return []


@contextmanager
def hostile(says: Say = silent, needs: Say = silent, name: str = "stranger") -> Iterator[Hostile]:
    worker = Hostile(says, needs, name)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()
        worker.net.close()
