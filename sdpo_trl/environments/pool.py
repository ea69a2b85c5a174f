"""Many programs at once.

Knows: threads, order, a progress bar. Deliberately does not know: what a program is for. Threads are enough: each
waits for a process, and the processes do the work.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tqdm.auto import tqdm

from .program import Program, Run
from .sandbox import Sandbox

Item = TypeVar("Item")
Result = TypeVar("Result")


class SandboxPool:
    """
    Runs programs on `workers` threads, and stops them all if the caller is interrupted.

    What outlives its limit is killed by the thread that runs it; nothing that was started goes on after `map` ends,
    however it ends.

    Args:
        sandbox ([`Sandbox`]): Where programs run.
        workers (`int`, *optional*): Programs at once; by default the processors that this process may use.
        progress (`bool`): Show a bar.
    """

    def __init__(self, sandbox: Sandbox, workers: int | None = None, progress: bool = False) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}.")
        self.sandbox = sandbox
        self.workers = workers or len(os.sched_getaffinity(0))
        self.progress = progress

    def run(self, programs: Sequence[Program]) -> list[Run]:
        """One [`Run`] per program, in their order."""
        return self.map(lambda program, run: run(program), programs)

    def map(self, task: Callable[[Item, Callable[[Program], Run]], Result], items: Sequence[Item]) -> list[Result]:
        """
        Call `task(item, run)` for each item, where `run(program)` runs a program; results in the items' order.

        An exception of a task, or an interrupt, stops the running programs and is raised.
        """
        stop = threading.Event()

        def run(program: Program) -> Run:
            return self.sandbox.run(program, stop)

        executor = ThreadPoolExecutor(min(self.workers, max(1, len(items))), thread_name_prefix="sandbox")
        try:
            futures = [executor.submit(task, item, run) for item in items]
            with tqdm(total=len(items), desc="programs", disable=not self.progress) as bar:
                for future in futures:
                    future.add_done_callback(lambda _: bar.update())
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
                return [future.result() for future in futures]
        finally:
            stop.set()  # without effect where all is done
            executor.shutdown(cancel_futures=True)
