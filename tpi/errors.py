"""Every error that TPI raises on purpose: one tree, one clear sentence each.

    TpiError                 exit code 1
    +-- UsageError           exit code 2: the command line or a file the user named is wrong
    |   +-- ModelError       a model that is unknown, damaged, or of an unsupported architecture
    |   +-- PlanError        a placement that cannot work: more nodes than units, too little memory
    +-- MessageError         bytes that are not a valid message
    +-- NodeError            another node failed, refused, or was lost; `.node` names it
    |   +-- NodeLost         it did not answer within its deadline
    |   +-- NodeRefused      it answered, and said no
    +-- BusyError            more is asked than can wait, or the server is shutting down
    +-- PairingError         two machines did not get to trust each other
    +-- TestbedError         the emulated network cannot be made, is not as specified, or is gone
    +-- NotFiniteError       a result holds infinities or NaN
    +-- WeightsError         a weight file is missing, short, or does not match its hash
    +-- KernelError          kernels that cannot run here, or an array that does not fit them
    +-- DeviceError          memory that is not the device's own, or a copy that does not fit
        +-- DeviceFullError  a device's memory does not hold what is asked of it; `.least` is the limit that would
        +-- EmulationError   an emulated device whose real computing took longer than its times allow

A message names the thing that is wrong and the way out; the CLI prints it without a traceback.
"""


class TpiError(Exception):
    """Root of the tree. `exit_code` is what the CLI exits with."""

    exit_code = 1


class UsageError(TpiError):
    """Something that the user typed, or a file that the user named, is wrong."""

    exit_code = 2


class ModelError(UsageError):
    """The model is unknown, damaged, or of an architecture that is not supported."""


class PlanError(UsageError):
    """The model cannot be placed on these nodes; `node` names the one that it is too much for, if it is one.

    Attributes:
        context: tokens of context with which the model would fit in RAM, 0 if with none; None if RAM is not what lacks.
    """

    def __init__(self, message: str, node: str = "", context: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.context = context


class MessageError(TpiError):
    """Bytes that do not decode to a valid message."""


class NodeError(TpiError):
    """Another node failed; `node` is the name or address under which the user knows it."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(message)
        self.node = node


class NodeLost(NodeError):
    """The node did not answer, or made no progress, within its deadline."""


class NodeRefused(NodeError):
    """The node answered, and refused: another version, in use, out of memory."""


class NodeInUse(NodeRefused):
    """The node serves another master now."""


class NodeTwice(NodeRefused):
    """The node serves this master already, at another address: at the one where it was, if it has moved."""


class BusyError(TpiError):
    """More is asked of a server than can wait for its turn, or it is shutting down."""


class WeightsError(TpiError):
    """A weight file is missing, short, unreadable, or does not match its hash."""


class NotFiniteError(TpiError):
    """What a node or the model computed holds infinities or NaN."""


class KernelError(TpiError):
    """The kernels cannot run here, or an array handed to one has the wrong dtype, shape, alignment or contiguity."""


class DeviceError(TpiError):
    """A device was handed memory that is not its own, or a copy whose ends do not fit each other."""


class DeviceFullError(DeviceError):
    """A device's memory has no room; `least` is the smallest limit, in bytes, that would do."""

    def __init__(self, device: str, limit: int, least: int) -> None:
        super().__init__(
            f"{device} may use {limit} bytes of memory, and what is asked of it needs {least}: raise its limit to that,"
            " or give it less to hold"
        )
        self.least = least


class EmulationError(DeviceError):
    """An emulated device computed too slowly in earnest, or was never measured: its times say nothing of a schedule."""


class PairingError(TpiError):
    """Two machines did not exchange their keys: a wrong code, or the connection broke."""


class TestbedError(TpiError):
    """The emulated network cannot be made on this machine, is not as specified, or is gone."""

    __test__ = False  # no test class, whatever its name says to pytest
