"""The session in a terminal: what is typed, and what it does.

Knows: keys, commands, prompts. Deliberately does not know: how a model learns, how things are drawn.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console
from rich.padding import Padding

from . import terminal
from .desk import Desk
from .editing import edit_calls, fix_call, run_editor
from .records import ContextTooLong, SessionError
from .talk import Stopped, Talk

HELP = """\
while a call or an answer waits:
  y              yes: run it, let the model go on
  n REASON       no: the model learns from the reason at once, and tries again
  e              edit the arguments (or the answer) in $EDITOR; the model learns to prefer yours
  v              view all of it, where lines were left out
  (an answer without a call is also accepted by typing what you say next)
at any time:
  /retry         let the model answer   /learn         learn from what was denied so far
  /deny REASON   deny the answer before /undo          take the last update back
  /changes       what it changed        /teacher       what the teacher was told
  /metrics       the updates so far     /history       the conversation, numbered
  /drop N        take turn N out        /clear         start the conversation anew
  /save [FOLDER] save                   /quit, Ctrl-D  save and leave
Ctrl-C stops an answer, a command or an update, not the program."""


class App(Talk):
    """
    A person's session.

    Args:
        desk ([`Desk`]): With its session.
        save_to (`Path`): Where the session is saved.
        screen (`Console`): See [`~sdpo_trl.online.terminal.console`].
        title (`str`): What is shown at the start.
        editor (`Callable[[str, str], str]`): Lets a person change a text; see [`run_editor`].
        streams (`dict`): `input` and `output` for prompt_toolkit, by default the terminal's.
    """

    def __init__(
        self,
        desk: Desk,
        save_to: Path,
        screen: Console,
        *,
        title: str = "",
        editor: Callable[[str, str], str] = run_editor,
        **streams: Any,
    ) -> None:
        super().__init__(desk, screen)
        self.save_to = save_to
        self._title = title
        self._editor = editor
        self._status = ""
        self._unsaved = False  # whether leaving has failed to save
        self._asked: PromptSession = PromptSession(
            history=InMemoryHistory(),
            completer=WordCompleter(list(self._commands()), sentence=True),
            complete_while_typing=False,
            bottom_toolbar=lambda: self._status,
            **streams,
        )

    def run(self) -> int:
        """Until the person leaves. Returns the exit status."""
        self.tell(f"{self._title}\n/help tells what can be typed.", "dim")
        if self.session.pending is not None:
            self.tell("The session goes on where it was left.", "dim")
            self.screen.print(terminal.text_of(self.session.pending.text))
            self.show(self.session.pending)
        while True:
            try:
                self._status = self._toolbar()
                line = _as_text(self._asked.prompt(self._label())).strip()
            except KeyboardInterrupt:
                self.tell("Ctrl-D or /quit leaves; /help tells the rest.", "dim")
                continue
            except EOFError:
                line = "/quit"
            try:
                if line == "/quit":
                    status = self._leave()
                    if status is not None:
                        return status
                else:
                    self._unsaved = False
                    self.take(line)
            except Stopped:
                self.tell("stopped", "dim")
            except ContextTooLong as error:
                drop = "" if error.turn is None else f" `/drop {error.turn}` takes a turn out, `/clear` all of them."
                self.problem(f"{error}{drop}")
            except TemplateError as error:
                self.problem(
                    f"The chat template refuses the conversation: {error}. `/history`, `/drop N` or `/clear`."
                )
            except torch.OutOfMemoryError as error:
                self.problem(f"Out of memory; `/clear`, or drop turns: {error}")
            except (SessionError, ValueError, IndexError, OSError) as error:
                self.problem(str(error))
            except KeyboardInterrupt:
                self.tell("stopped; the weights are as they were (`/learn` or `/retry` goes on)", "dim")

    def _leave(self) -> int | None:
        """Save; where that fails, stay, but not a second time."""
        if self._unsaved:
            return 1
        try:
            self.save(self.save_to)
        except OSError as error:
            self._unsaved = True
            self.problem(
                f"Not saved: {error}. `/save FOLDER` saves elsewhere; /quit again leaves (the journal is kept)."
            )
            return None
        return 0

    def take(self, line: str) -> None:
        """What one typed line does."""
        word, _, rest = line.partition(" ")
        if line.startswith("/"):
            self._command(word, rest.strip())
        elif self.session.pending is not None:
            self._answer(line, word, rest.strip())
        elif line:
            self.session.say(line)
            self.respond()

    def _answer(self, line: str, word: str, rest: str) -> None:
        """A line while a reply waits."""
        pending = self.session.pending
        if line == "y":
            self._approve()
        elif line == "n" and self.edited is not None:
            self.edited = None
            self.tell("Your version is dropped; the model's own waits again.", "dim")
            self.show(pending)
        elif word == "n":
            self._deny(rest)
        elif line == "e":
            self._edit()
        elif line == "v":
            self.show_looks(self.edited if isinstance(self.edited, list) else self.seen, whole=True)
        elif line and not pending.calls and not pending.error and self.edited is None:
            self._approve()
            self.take(line)
        else:
            self.tell("y: run it. n REASON: deny it. e: edit it. v: view all of it. /help: the rest.", "dim")

    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "/help": lambda rest: self.tell(HELP),
            "/metrics": lambda rest: self.metrics(),
            "/history": lambda rest: self.history(),
            "/teacher": lambda rest: self.teacher(),
            "/changes": lambda rest: self.changes(),
            "/learn": lambda rest: self.learn(),
            "/retry": lambda rest: self.respond(),
            "/undo": lambda rest: self.undo(),
            "/clear": lambda rest: self.clear(),
            "/deny": self._deny,
            "/drop": self._drop,
            "/save": lambda rest: self.save(Path(rest).expanduser() if rest else self.save_to),
            "/quit": lambda rest: None,
        }

    def _command(self, word: str, rest: str) -> None:
        commands = self._commands()
        if word not in commands:
            raise SessionError(f"There is no command {word}. `/help` lists them.")
        if rest and word not in ("/deny", "/drop", "/save"):
            raise SessionError(f"{word} takes nothing after it.")
        commands[word](rest)

    def _approve(self) -> None:
        """Run it; after a tool, the model goes on."""
        learns = self.edited is not None
        observations = self.approve()
        if learns:
            self.learn()
        if observations:
            self.respond()

    def _deny(self, reason: str) -> None:
        """The model learns at once, and tries again."""
        if not reason:
            try:
                reason = self._asked.prompt("what should it have done? > ").strip()
            except (KeyboardInterrupt, EOFError):
                self.tell("nothing was denied", "dim")
                return
        self.session.deny(reason or None)
        self.edited = None
        self.learn()
        self.respond(self.session.retry)

    def _drop(self, rest: str) -> None:
        if not rest.isdecimal():
            raise SessionError("Say which turn: `/drop N`. `/history` numbers them.")
        self.drop(int(rest))

    def _edit(self) -> None:
        """Let the person make something else of the reply; it is shown, and waits for a yes."""
        reply = self.session.pending
        if reply.calls or (reply.error and not reply.truncated):
            if isinstance(self.edited, list):
                changed = edit_calls([look.call for look in self.edited], self._editor)
            elif reply.calls:
                changed = edit_calls(reply.calls, self._editor)
            else:
                changed = fix_call(reply.text, self._editor)
            self.edited = self.edited if changed is None else self.desk.looks(changed)
        else:
            before = self.edited if isinstance(self.edited, str) else reply.text
            text = self._editor(before, ".md").rstrip("\n")
            self.edited = text if text.strip() and text != reply.text.rstrip("\n") else self.edited
        if self.edited is None:
            self.tell("nothing was changed", "dim")
        elif isinstance(self.edited, str):
            self.screen.print(Padding(terminal.text_of(self.edited), (0, 0, 0, 2), expand=False))
        else:
            self.show_looks(self.edited)

    def _label(self) -> str:
        if self.edited is not None:
            return "yours: y/n/e > "
        pending = self.session.pending
        if pending is None:
            return "you > "
        return "y/n/e > " if pending.calls or pending.error else "y/n/e or you > "

    def _toolbar(self) -> str:
        parts = [f"updates {self.session.updates}", f"teacher {self.session.teacher}", "/help"]
        with contextlib.suppress(TemplateError):  # told when an answer is asked for
            used, limit = self.session.context if self.session.messages else (0, None)
            parts.insert(1, f"context {used}" + ("" if limit is None else f" of {limit}") + " tokens")
        return f" {' | '.join(parts)} "


def _as_text(line: str) -> str:
    """What was typed; bytes that are no text, which Python keeps as lone surrogates, become question marks."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
