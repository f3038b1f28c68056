"""Tells the service manager that started this process how it is: `sd_notify` of systemd.

Knows one socket and some words. Where no service manager listens, nothing is sent. The protocol:
https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

import logging
import os
import socket

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"


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
