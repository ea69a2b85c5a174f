"""A bar while something takes long, for who looks at a terminal.

Knows: tqdm, threads. Deliberately does not know: trainers.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

# Seconds before a bar appears, so that short waits show nothing; and between two looks at the clock.
_PATIENCE = 2.0
_TICK = 1.0


def _nothing() -> None:
    pass


@contextmanager
def waiting(what: str, *, shown: bool, total: int | None = None, unit: str = "it") -> Iterator[Callable[[], None]]:
    """
    Within, a bar tells what is going on and for how long; it appears after two seconds and then leaves no trace.

    Args:
        what (`str`): In a few words.
        shown (`bool`): Whether this process shows it at all; where its errors go to no terminal, none does.
        total (`int`, *optional*): Of the units; `None`: only the time is shown.
        unit (`str`): What is counted.

    Returns:
        `Iterator[Callable]`: what is called within, once per unit.
    """
    if not shown:
        yield _nothing
        return
    form = None if total else "{desc} [{elapsed}]"
    bar = tqdm(
        desc=what, total=total, unit=unit, leave=False, delay=_PATIENCE, disable=None, dynamic_ncols=True,
        bar_format=form,
    )  # fmt: skip
    if bar.disable:
        yield _nothing
        return
    ended = threading.Event()

    def tick() -> None:
        pause = _PATIENCE
        while not ended.wait(pause):
            bar.refresh()  # the clock goes on while a call of somebody else's counts nothing
            pause = _TICK

    ticker = threading.Thread(target=tick, name="sdpo-progress", daemon=True)
    ticker.start()
    try:
        yield bar.update
    finally:
        ended.set()
        ticker.join()
        bar.close()
