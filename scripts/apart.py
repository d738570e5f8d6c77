"""For scripts that restart jobs soon after they have ended."""
import contextlib
import fcntl
import os
import socket
import struct

SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x1 | 0x40


def apart():
    """A network of its own for the calling process, where that is allowed: as on another machine. A port that a job has left in
    TIME-WAIT would have the next one wait for a minute."""
    with contextlib.suppress(OSError, AttributeError):
        os.unshare(os.CLONE_NEWNET)
        up = struct.pack("16sH22x", b"lo", IFF_UP_RUNNING)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)
