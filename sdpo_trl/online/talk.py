"""What happens in a session and what is shown of it, one method each: the common part of the app and of scripts.

Knows: the order of things (looked at, run, shown), Ctrl-C. Deliberately does not know: what is typed, script files.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from . import terminal
from .desk import Changed, Desk, Look
from .records import Observation, Progress, Reply


class Stopped(Exception):
    """Ctrl-C while the model answered."""


class Talk:
    """
    Args:
        desk ([`Desk`]): With its session.
        screen (`Console`): See [`~sdpo_trl.online.terminal.console`].
    """

    def __init__(self, desk: Desk, screen: Console) -> None:
        self.desk = desk
        self.session = desk.session
        self.screen = screen
        self.seen: list[Look] = []  # what the pending reply wants, as it was shown
        self.edited: list[Look] | str | None = None  # what a person made of it
        self.observations: list[Observation] = []  # of the last approval

    def respond(self, ask: Callable[..., Reply] | None = None) -> Reply:
        """
        Stream an answer and show what it wants to do.

        Args:
            ask (`Callable`, *optional*): `session.respond` (the default) or `session.retry`.

        Raises:
            [`Stopped`]: Ctrl-C; nothing is pending.
        """
        self.screen.print(Text("\nmodel", style="bold blue"))
        with self.interruptible() as stopped:

            def piece(text: str) -> None:
                if stopped():
                    raise Stopped
                self.screen.print(terminal.text_of(text), end="", soft_wrap=True)

            try:
                reply = (ask or self.session.respond)(on_text=piece)
            finally:
                self.screen.print()
        self.edited = None  # not before: where no answer was possible, the person's version still waits
        self.show(reply)
        return reply

    def show(self, reply: Reply) -> None:
        """What a reply wants, before anything runs."""
        if reply.error:
            self.problem(reply.error)
        self.seen = self.desk.looks(reply.calls)
        self.show_looks(self.seen)

    def show_looks(self, looks: Sequence[Look], whole: bool = False) -> None:
        """Calls and what they would do; with `whole`, to the last line."""
        for number, look in enumerate(looks, 1):
            view = terminal.call_view(look.call, look.diff, look.problem, number, len(looks), whole)
            self.screen.print(view)

    def approve(self) -> list[Observation]:
        """
        Run what was looked at: the pending reply's calls, or what a person made of them.

        Raises:
            [`Changed`]: the folder has changed, nothing ran; what the calls would do now has been shown.
        """
        edited = self.edited
        try:
            with self.interruptible(self.desk.stop, hard=False):
                observations = self.desk.approve(self.seen) if edited is None else self.desk.approve_edited(edited)
        except Changed:
            self.seen = self.desk.looks(self.session.pending.calls)
            if isinstance(edited, list):
                self.edited = self.desk.looks([look.call for look in edited])
            self.show_looks(self.edited if isinstance(self.edited, list) else self.seen)
            raise
        self.edited, self.observations = None, observations
        for observation in observations:
            self.screen.print(terminal.observation_view(observation))
        return observations

    def learn(self) -> dict[str, float]:
        """
        One update, with a line that shows where it stands, and what it changed in the answer denied last. Ctrl-C
        leaves the weights as they were.
        """
        with terminal.progress_line(self.screen) as line:
            task = line.add_task("", total=5)

            def moved(progress: Progress) -> None:
                line.update(task, total=progress.total, completed=progress.done, description=progress.stage)

            metrics = self.session.learn(on_progress=moved)
        self.tell(terminal.learned(metrics, self.session.updates), "bold green")
        self.screen.print(terminal.changes_view(self.session.changes()[-1:]))
        return metrics

    def undo(self) -> None:
        """Take the last update back."""
        self.session.undo()
        self.tell(f"the last update is taken back; {self.session.updates} are in force", "dim")

    def clear(self) -> None:
        """A new conversation."""
        self.session.clear()
        self.edited = None
        self.tell("a new conversation; what was learned stays", "dim")

    def drop(self, turn: int) -> None:
        """Take a turn out of the conversation."""
        self.session.drop(turn)
        self.tell(f"turn {turn} is out of the conversation", "dim")

    def save(self, folder: Path) -> None:
        """Keep the session."""
        self.session.save(folder)
        self.tell(f"saved to {folder}", "dim")

    def teacher(self) -> None:
        """What the teacher was told about the answers denied last."""
        attempts = self.session.attempts
        self.tell(f"teacher: {self.session.teacher}", "bold")
        self.screen.print(terminal.taught_view(attempts))
        if not attempts:
            self.tell("It was told nothing yet: nothing was denied.", "dim")

    def changes(self, listed: int = 40) -> None:
        """What the last update changed."""
        self.screen.print(terminal.changes_view(self.session.changes(), listed))

    def metrics(self) -> None:
        """The updates in force."""
        self.screen.print(terminal.metrics_view(self.session.metrics))

    def history(self) -> None:
        """The conversation, numbered."""
        self.screen.print(terminal.history_view(self.session.messages))

    def tell(self, words: str, style: str = "") -> None:
        """A line of the program's own."""
        self.screen.print(terminal.text_of(words, style))

    def problem(self, words: str) -> None:
        """What went wrong."""
        self.tell(words, "red")

    @contextmanager
    def interruptible(
        self, stop: Callable[[], None] = lambda: None, hard: bool = True
    ) -> Iterator[Callable[[], bool]]:
        """
        Within, Ctrl-C asks to stop; where it is `hard`, the second one interrupts: not between an approved call and
        its reply, both of which the conversation needs. Other threads get no signals.
        """
        asked: list[bool] = []
        if threading.current_thread() is not threading.main_thread():
            yield lambda: False
            return

        def handler(number: int, frame: Any) -> None:
            if asked and hard:
                raise KeyboardInterrupt
            asked.append(True)
            stop()

        previous = signal.signal(signal.SIGINT, handler)
        try:
            yield lambda: bool(asked)
        finally:
            signal.signal(signal.SIGINT, previous)
