"""The two kinds of ZeroMQ socket that collectives use, with every option that matters set.

A pair of nodes shares one connection: the lower rank's DEALER connects to the higher rank's ROUTER. The DEALER chooses
its own routing id from session, epoch and rank, so the ROUTER knows who may speak and whom to send to without a handshake.
"""

from struct import Struct

import zmq

from allreduce.header import HEADER_BYTES

SEGMENT_VALUES = 1 << 16  # values in one frame; longer messages travel as several, so that a slow link shows progress
MAX_FRAME = HEADER_BYTES + 4 * SEGMENT_VALUES
SLICE_MS = 100  # how often a wait looks up
RECEIVE_FRAMES = 64  # per connection: bounds what a peer can make this node hold to 16 MiB
SEND_FRAMES = 1024
_HEARTBEAT_MS = 1000
_DEAD_MS = 30_000  # a connection without any sign of life; the deadlines of the waits come first
_IDENTITY = Struct("<cQIH")

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def identity(session: int, epoch: int, rank: int) -> bytes:
    """Routing id of the member `rank` of a group."""
    return _IDENTITY.pack(b"T", session, epoch, rank)


def _prepare(socket: Socket) -> Socket:
    socket.linger = 0
    socket.maxmsgsize = MAX_FRAME
    socket.sndhwm = SEND_FRAMES
    socket.rcvhwm = RECEIVE_FRAMES
    socket.sndtimeo = SLICE_MS
    socket.rcvtimeo = SLICE_MS
    socket.setsockopt(zmq.IMMEDIATE, 1)  # never queue for a connection that is not there
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _DEAD_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def bound_router(context: Context, address: str) -> tuple[Socket, str]:
    """A ROUTER bound to `address` (port 0 or `*`: any free one), and the address that it got."""
    socket = _prepare(context.socket(zmq.ROUTER))
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a member that connects again replaces its old connection
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def connected_dealer(context: Context, address: str, name: bytes) -> Socket:
    """A DEALER that connects to the ROUTER at `address` under the routing id `name`."""
    socket = _prepare(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.ROUTING_ID, name)
    socket.connect(address)
    return socket
