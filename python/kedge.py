"""Checkpoints and moves that a program asks for itself.

    import kedge

    if kedge.present() and kedge.checkpoint() is kedge.RESTARTED:
        ...  # this is the program as it was brought back

Any thread may ask. The program stands still for some milliseconds, with all of its job's processes, so
nothing is to be prepared. One checkpoint of a job at a time: where several processes are to be saved
together, one of them asks. docs/checkpoint.md has more.

    kedge.migrate("local:1")  # all that the job has on its devices goes there, while it runs

docs/migrate.md has more. Needs nothing but Python 3.6.

SPDX-License-Identifier: Apache-2.0 OR MIT
"""

import enum
import json
import os
import socket
import struct
import time

__all__ = ["CAPTURED", "DURABLE", "GOES_ON", "RESTARTED", "Error", "checkpoint", "migrate", "present"]

# Bytes of the longest path in a socket's address.
_LONGEST = 107
_VERSION = 1
# Longest message that the job sends.
_MOST = 64 << 10
# How long a job that has just been restarted may need until it answers, in seconds.
_BEGINNING = 10


class Until(enum.Enum):
    """What is waited for."""

    CAPTURED = "captured"  # the program goes on; a failure from here on is in the job's log only
    DURABLE = "durable"  # the image is on the disk and counts


class Outcome(enum.Enum):
    """What a checkpoint was for this program."""

    GOES_ON = "goes on"  # saved, and this is the program that asked
    RESTARTED = "restarted"  # brought back from the image that it asked for


CAPTURED, DURABLE = Until.CAPTURED, Until.DURABLE
GOES_ON, RESTARTED = Outcome.GOES_ON, Outcome.RESTARTED


class Error(Exception):
    """There was no checkpoint, or no move; the words say why."""


def present():
    """Whether the program was started by kedge."""
    return bool(os.environ.get("KEDGE_CONTROL"))


def checkpoint(until=DURABLE):
    """Saves the job that this process is of, and waits until that is captured or durable.

    Returns GOES_ON or RESTARTED. Raises Error where there was no checkpoint, and where there is no kedge.
    """
    until = Until(until)
    if not present():
        raise Error("the program was not started by kedge")
    try:
        before = _life()
        with _ask({"checkpoint": {"stop": False}}) as job:
            while True:
                reply = _receive(job)
                if reply is None:
                    break
                if "progress" not in reply:
                    raise Error(_failure(reply))
                if "durable" in reply["progress"] or until is CAPTURED:
                    return GOES_ON
    except (OSError, ValueError) as error:
        raise Error("the job's supervisor does not answer: {}".format(error)) from error
    return _returned(before)


def migrate(to, max_pause=None, rounds=8, rate=None, check=False, tell=None):
    """Moves all that the job has on its devices to others, as `kedge migrate --to` names them.

    Returns when it is there: the events, dictionaries as `kedge migrate --json` prints them. Each is also given to
    `tell` as it comes. max_pause: seconds for which the job may stand still; it stays where it is rather than to do so
    for longer. rate: bytes a second that cross, at most. check: only to find out whether it can. Raises Error where it
    stays, and where there is no kedge.
    """
    if not present():
        raise Error("the program was not started by kedge")
    pause = 50 if max_pause is None else max(1, int(max_pause * 1000))
    order = {"to": str(to), "max_pause_ms": pause, "rounds": int(rounds), "or_stay": max_pause is not None}
    order.update({"check": bool(check)}, **({} if rate is None else {"rate": int(rate)}))
    events = []
    for event in _moving(order):
        events.append(event)
        if tell is not None:
            tell(event)
    return events


def _moving(order):
    """The events of a move, as they come. What is raised where they go is none of the supervisor's."""
    try:
        with _ask({"migrate": order}) as job:
            while True:
                reply = _receive(job)
                if reply is None:
                    raise Error("the job's supervisor has hung up: kedge logs may say what became of the move")
                if "moving" not in reply:
                    raise Error(_failure(reply))
                yield reply["moving"]
                if reply["moving"].get("event") == "done":
                    return
    except (OSError, ValueError) as error:
        raise Error("the job's supervisor does not answer: {}".format(error)) from error


def _returned(before):
    """The connection has gone: the job was restarted, or its supervisor has ended."""
    deadline = time.monotonic() + _BEGINNING
    while True:
        try:
            if _life() != before:
                return RESTARTED
            raise Error("the job's supervisor has hung up: kedge logs may say why")
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise Error("the job's supervisor does not answer: {}".format(error)) from error
        time.sleep(0.01)


def _life():
    """Which life of the job this is."""
    with _ask("life") as job:
        reply = _receive(job) or {}
    if "life" not in reply:
        raise ValueError(_failure(reply))
    return reply["life"]


def _failure(reply):
    words = reply.get("failed", {}).get("message")
    return words or "it answers in a way that this module does not know"


def _ask(what):
    """Connects to the job and asks."""
    job = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(job, os.environ["KEDGE_CONTROL"])
        body = json.dumps({"version": _VERSION, "ask": what}).encode()
        job.sendall(struct.pack("<I", len(body)) + body)
    except BaseException:
        job.close()
        raise
    return job


def _connect(job, path):
    """Connects; a path that is too long for an address is reached by its folder's descriptor."""
    if len(os.fsencode(path)) <= _LONGEST:
        return job.connect(path)
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        return job.connect(f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


def _receive(job):
    """A message; None where the other end has gone."""
    head = _read(job, 4)
    if head is None:
        return None
    (length,) = struct.unpack("<I", head)
    if length > _MOST:
        raise ValueError("a message is too long")
    body = _read(job, length)
    return None if body is None else json.loads(body.decode())


def _read(job, length):
    data = b""
    while len(data) < length:
        try:
            piece = job.recv(length - len(data))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        data += piece
    return data
