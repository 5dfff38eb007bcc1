from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class Mailbox:
    def __init__(self, library: str, rank: int, size: int, session: int, epoch: int, spin: float) -> None: ...
    def connect(self, rank: int, socket: int, name: bytes) -> None: ...
    def begin(self, step: int) -> None: ...
    def reserve(self, number: int) -> None: ...
    def send(
        self,
        ranks: Sequence[int],
        tag: int,
        wire: int,
        count: int,
        values: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
        raw: bool,
    ) -> list[int]: ...
    def receive(
        self,
        rank: int,
        tag: int,
        wire: int,
        count: int,
        out: npt.NDArray[np.float32] | npt.NDArray[np.uint8],
        add: bool,
        raw: bool,
    ) -> bool: ...
    def sum(
        self, next: int, tag: int, wire: int, values: npt.NDArray[np.float32], out: npt.NDArray[np.float32]
    ) -> int: ...
    def drain(self) -> None: ...
    def take_dropped(self) -> int: ...
    def close(self) -> None: ...
