"""Tells the service manager that started this process how it is: `sd_notify` of systemd.

Knows one socket and some words. Where no service manager listens, nothing is sent. The protocol:
https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

import asyncio
import logging
import os
import socket

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE = "WATCHDOG_USEC", "WATCHDOG_PID"

TOLD_TIMES = 3  # how often in its time a service manager hears that the loop turns


def notify(*words: str) -> None:
    """Send words such as "READY=1" to the service manager, if one listens."""
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket begins with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # a service manager that does not read holds up no request
            sock.sendto("\n".join(words).encode(), address)
    except OSError as error:
        logger.warning("the service manager at %s does not listen: %s", address, error.strerror)


async def tell_that_the_loop_turns() -> None:
    """Tell the service manager so again and again until cancelled, if it watches this process:
    with `WatchdogSec=` systemd ends a service that has not said so for that long.
    """
    seconds = _watchdog_seconds()
    while seconds is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / TOLD_TIMES)


def _watchdog_seconds() -> float | None:
    """Seconds after which the service manager ends this process if it says nothing."""
    watched = os.environ.get(WATCHDOG_PID_VARIABLE)
    microseconds = os.environ.get(WATCHDOG_VARIABLE, "")
    if watched not in (None, str(os.getpid())) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None
