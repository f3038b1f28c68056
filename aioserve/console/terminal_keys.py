"""Keeps every key that a person types at a terminal, also one that comes while nothing reads.

Knows terminal modes and signals; knows nothing of what is typed.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NUDGE_SECONDS = 0.05  # between two interruptions of a wait that has missed a Ctrl-C
_END = b"\0"  # no signal has this number


@contextmanager
def keeping_keys() -> Iterator[None]:
    """Inside the block the terminal hands on keys one by one, as readline has it while it reads.

    Between two lines readline puts the terminal back into the mode that it found. In the usual one
    the kernel collects whole lines, and takes a Ctrl-D for itself: typed while a reply streams, it
    would reach nothing. Where there is no terminal of that kind, nothing is changed.
    """
    try:
        import termios

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, termios.error):
        yield
        return
    by_key = [*before[:3], before[3] & ~termios.ICANON, *before[4:]]
    by_key[6] = list(before[6])
    by_key[6][termios.VMIN], by_key[6][termios.VTIME] = 1, 0
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, by_key)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Inside the block, which reads a line by `input`, a Ctrl-C is heard at once.

    readline looks for signals when one ends its wait for a key: one that comes just before the
    wait would be heard with the next key. So a thread is told of each SIGINT as it arrives, and
    interrupts the wait by a signal that does nothing else, until the block has ended. For the main
    thread alone, which has the signals.
    """
    if not hasattr(signal, "pthread_kill"):
        yield
        return
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    usual = signal.signal(signal.SIGURG, lambda number, frame: None)
    earlier = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    main = threading.get_ident()
    thread = threading.Thread(target=_nudge, args=(told, main), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.write(tell, _END)
        thread.join()
        signal.signal(signal.SIGURG, usual)
        os.close(told)
        os.close(tell)


def _nudge(told: int, main: int) -> None:
    """Interrupt the thread `main` again and again from the first SIGINT on that `told` tells of."""
    has_come = False
    while True:
        if select.select([told], [], [], _NUDGE_SECONDS if has_come else None)[0]:
            numbers = os.read(told, 4096)
            if _END in numbers:
                return
            has_come = has_come or signal.SIGINT in numbers
        elif has_come:
            signal.pthread_kill(main, signal.SIGURG)
