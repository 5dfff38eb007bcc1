"""Exceptions that TPI raises on purpose, in one tree. Each message is one sentence.

    TpiError                 exit code 1
    +-- UsageError           exit code 2: the command line or a file the user named is wrong
    |   +-- ModelError       a model is unknown, damaged, or of an unsupported architecture
    |   +-- PlanError        a placement cannot work: more nodes than units, too little memory
    +-- MessageError         bytes are not a valid message
    +-- NodeError            another node failed, refused, or was lost; `.node` names it
    |   +-- NodeLost         the node did not answer within its deadline
    |   +-- NodeRefused      the node answered, and refused
    |       +-- NodeInUse    the node serves another master
    |       +-- NodeTwice    the node serves this master already, under another address
    +-- BusyError            the queue of requests is full, or the server is shutting down
    +-- PairingError         two machines could not be paired
    +-- TestbedError         the emulated network cannot be created, is not as specified, or is gone
    +-- NotFiniteError       a result contains infinities or NaN
    +-- WeightsError         a weight file is missing, short, or does not match its hash
    +-- KernelError          kernels cannot run on this machine, or an array does not fit them
    +-- DeviceError          memory is not the device's own, or a copy does not fit
        +-- DeviceFullError  a device's memory limit is too low; `.least` is the limit that would do
        +-- EmulationError   the real work of an emulated device took longer than its emulated times

A message names what is wrong and what to do. The CLI prints it without a traceback.
"""


class TpiError(Exception):
    """Base class of all of TPI's own errors. `exit_code` is the exit code of the CLI."""

    exit_code = 1


class UsageError(TpiError):
    """Raised if something that the user typed, or a file that the user named, is wrong."""

    exit_code = 2


class ModelError(UsageError):
    """Raised if the model is unknown, damaged, or of an architecture that is not supported."""


class PlanError(UsageError):
    """Raised if the model cannot be placed on these nodes.

    Attributes:
        node: name of the node that cannot hold its part, if it is a single one; else empty.
        context: tokens of context with which the model would fit in RAM; 0 if it would not fit with any; None if RAM is
            not what is lacking.
    """

    def __init__(self, message: str, node: str = "", context: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.context = context


class MessageError(TpiError):
    """Raised if bytes do not decode to a valid message."""


class NodeError(TpiError):
    """Raised if another node failed. `node` is the name or address by which the user knows it."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(message)
        self.node = node


class NodeLost(NodeError):
    """Raised if a node did not answer, or made no progress, within its deadline."""


class NodeRefused(NodeError):
    """Raised if a node answered, but refused: another version, in use by another master, or lack of memory."""


class NodeInUse(NodeRefused):
    """Raised if a node serves another master now."""


class NodeTwice(NodeRefused):
    """Raised if a node serves this master already, under another address.

    A node whose address has changed refuses in this way until it has given up its old connection.
    """


class BusyError(TpiError):
    """Raised if a server's queue of requests is full, or it is shutting down."""


class WeightsError(TpiError):
    """Raised if a weight file is missing, short, unreadable, or does not match its hash."""


class NotFiniteError(TpiError):
    """Raised if a result of a node or of the model contains infinities or NaN."""


class KernelError(TpiError):
    """Raised if kernels cannot run on this machine, or an array has the wrong dtype, shape, alignment or contiguity."""


class DeviceError(TpiError):
    """Raised if a device is given memory that is not its own, or a copy whose two ends differ in size."""


class DeviceFullError(DeviceError):
    """Raised if a device's memory limit is too low. `least` is the smallest limit, in bytes, that would do."""

    def __init__(self, device: str, limit: int, least: int) -> None:
        super().__init__(
            f"{device} may use {limit} bytes of memory, but needs {least}: raise its limit to that, or give it less to "
            "hold"
        )
        self.least = least


class EmulationError(DeviceError):
    """Raised if an emulated device computed more slowly than the device that it emulates, or was never measured.

    Times measured with it would be wrong.
    """


class PairingError(TpiError):
    """Raised if two machines did not exchange their keys: a wrong code, or the connection broke."""


class TestbedError(TpiError):
    """Raised if the emulated network cannot be created on this machine, is not as specified, or is gone."""

    __test__ = False  # keeps pytest from collecting it as a test class
