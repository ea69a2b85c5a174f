"""Plays a script: each step, what it printed, and whether what was expected came true.

Knows: steps, sessions. Deliberately does not know: YAML, keys, terminals.
"""

import math
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from rich.console import Console

from . import terminal
from .desk import Desk
from .editing import calls_text
from .records import Call, SessionError
from .script import Script, Step
from .talk import Stopped, Talk


class Unmet(Exception):
    """What a step expected did not come true."""


class Player(Talk):
    """
    Args:
        desk ([`Desk`]): With its session.
        screen (`Console`): The transcript goes there.
        save_to (`Path`, *optional*): For a `save` without a folder.
    """

    def __init__(self, desk: Desk, screen: Console, save_to: Path | None = None) -> None:
        super().__init__(desk, screen)
        self.save_to = save_to

    def play(self, script: Script) -> int:
        """
        All steps, until one fails.

        Returns:
            0, or 1 where something that was expected did not come true or a step was not possible.
        """
        if script.about:
            self.tell(script.about.strip(), "dim")
        return self._all(script.steps)

    def _all(self, steps: list[Step]) -> int:
        for step in steps:
            self.tell(f"--- {step.where}", "dim")
            try:
                if step.name == "repeat":
                    status = self._repeat(step)
                    if status:
                        return status
                else:
                    getattr(self, f"_do_{step.name}")(step.value)
            except Unmet as error:
                self.problem(f"FAILED at {step.where}: {error}")
                return 1
            except Stopped:
                self.problem(f"STOPPED at {step.where}")
                return 1
            except TemplateError as error:
                self.problem(f"NOT POSSIBLE at {step.where}: the chat template refuses the conversation: {error}")
                return 1
            except torch.OutOfMemoryError as error:
                self.problem(f"NOT POSSIBLE at {step.where}: out of memory: {error}")
                return 1
            except (SessionError, ValueError, IndexError, OSError) as error:
                self.problem(f"NOT POSSIBLE at {step.where}: {error}")
                return 1
        return 0

    def _repeat(self, step: Step) -> int:
        for _ in range(step.value["at_most"]):
            if self._unmet(step.value["until"]) is None:
                return 0
            status = self._all(step.steps)
            if status:
                return status
        missed = self._unmet(step.value["until"])
        if missed is not None:
            raise Unmet(f"after {step.value['at_most']} rounds: {missed}")
        return 0

    def _do_say(self, words: str) -> None:
        self.screen.print(terminal.text_of(f"you\n{words}", "bold"))
        self.session.say(words)
        self.respond()

    def _do_respond(self, _: None) -> None:
        self.respond()

    def _do_retry(self, _: None) -> None:
        self.respond(self.session.retry)

    def _do_approve(self, _: None) -> None:
        self.approve()

    def _do_deny(self, told: dict[str, Any]) -> None:
        for name, value in told.items():
            shown = value if isinstance(value, str) else f"\n{calls_text(value)}".rstrip()
            self.tell(f"{name}: {shown}", "bold red")
        solution = told.get("solution")
        self.session.deny(**{**told, **({"solution": _one(solution)} if solution is not None else {})})

    def _do_edit(self, answer: Any) -> None:
        self.edited = answer if isinstance(answer, str) else self.desk.looks(answer)
        if isinstance(self.edited, str):
            self.tell(f"instead: {self.edited}")
        else:
            self.show_looks(self.edited)
        self.approve()

    def _do_learn(self, _: None) -> None:
        self.learn()

    def _do_undo(self, _: None) -> None:
        self.undo()

    def _do_clear(self, _: None) -> None:
        self.clear()

    def _do_drop(self, turn: int) -> None:
        self.drop(turn)

    def _do_save(self, folder: str | None) -> None:
        where = self.save_to if folder is None else Path(folder)
        if where is None:
            raise SessionError("Say where: `save: FOLDER`, or `--save FOLDER` on the command line.")
        self.save(where)

    def _do_metrics(self, _: None) -> None:
        self.metrics()

    def _do_teacher(self, _: None) -> None:
        self.teacher()

    def _do_changes(self, _: None) -> None:
        self.changes()

    def _do_history(self, _: None) -> None:
        self.history()

    def _do_file(self, wanted: dict[str, str]) -> None:
        if self.desk.tools is None:
            raise SessionError("There is no working folder: `--folder` names one.")
        self.desk.tools.workspace.write(wanted["path"], wanted["text"].encode())

    def _do_expect(self, wanted: dict[str, Any]) -> None:
        missed = self._unmet(wanted)
        if missed is not None:
            raise Unmet(missed)
        self.tell("as expected", "green")

    def _unmet(self, wanted: dict[str, Any]) -> str | None:
        """What of it is not so, `None` if all is."""
        for key, value in wanted.items():
            missed = getattr(self, f"_look_{key}")(value)
            if missed is not None:
                return f"`{key}`: {missed}"
        return None

    def _reply(self) -> Any:
        if self.session.pending is None:
            raise Unmet("no answer is pending")
        return self.session.pending

    def _look_tool(self, name: str | None) -> str | None:
        call = self._reply().call
        got = None if call is None else call.name
        return None if got == name else f"wanted {name or 'an answer without a call'}, got {got or 'one without'}"

    def _look_arguments(self, wanted: dict[str, Any]) -> str | None:
        call = self._reply().call
        got = call.arguments if call is not None and isinstance(call.arguments, dict) else {}
        for key, value in wanted.items():
            if key not in got or got[key] != value:
                return f"wanted {key} to be {value!r}, got {got.get(key)!r}"
        return None

    def _look_text(self, words: str) -> str | None:
        return None if words in self._reply().text else f"{words!r} is not in {self._reply().text!r}"

    def _look_not_text(self, words: str) -> str | None:
        return f"{words!r} is in {self._reply().text!r}" if words in self._reply().text else None

    def _look_matches(self, pattern: Any) -> str | None:
        found = pattern.search(self._reply().text)
        return None if found else f"{pattern.pattern!r} does not match {self._reply().text!r}"

    def _look_error(self, wanted: bool) -> str | None:
        error = self._reply().error
        return None if (error is not None) == wanted else f"the error is {error!r}"

    def _look_truncated(self, wanted: bool) -> str | None:
        return None if self._reply().truncated == wanted else f"it is {not wanted}"

    def _look_pending(self, wanted: bool) -> str | None:
        got = self.session.pending is not None
        return None if got == wanted else f"an answer is {'' if got else 'not '}pending"

    def _look_observation(self, words: str) -> str | None:
        got = "\n".join(observation.text for observation in self.observations)
        return None if words in got else f"{words!r} is not in {got!r}"

    def _look_observation_ok(self, wanted: bool) -> str | None:
        if not self.observations:
            return "no tool has run"
        got = all(observation.ok for observation in self.observations)
        return None if got == wanted else f"the tools {'did their work' if got else 'failed'}"

    def _look_file(self, wanted: dict[str, Any]) -> str | None:
        path = wanted["path"]
        if self.desk.tools is None:
            return "there is no working folder"
        there = self.desk.tools.workspace.exists(path)
        if there != wanted.get("exists", True):
            return f"{path} {'exists' if there else 'does not exist'}"
        text = self.desk.tools.workspace.read(path).decode("utf-8", "backslashreplace") if there else ""
        if "text" in wanted and text != wanted["text"]:
            return f"{path} holds {text!r}"
        if wanted.get("contains", "") not in text:
            return f"{wanted['contains']!r} is not in {path}, which holds {text!r}"
        return None

    def _look_updates(self, wanted: int) -> str | None:
        return None if self.session.updates == wanted else f"there are {self.session.updates}"

    def _look_metrics(self, wanted: dict[str, dict[str, float]]) -> str | None:
        if not self.session.metrics:
            return "there was no update"
        last = self.session.metrics[-1]
        for name, limits in wanted.items():
            if name not in last:
                return f"there is no {name}; there are {', '.join(sorted(last))}"
            missed = _outside(last[name], limits)
            if missed is not None:
                return f"{name} {missed}"
        return None

    def _look_probability(self, wanted: dict[str, Any]) -> str | None:
        probability = math.exp(self.session.score(_one(wanted["of"])))
        self.tell(f"probability {probability:.4f}")
        return _outside(probability, wanted)


def _one(answer: str | list[Call]) -> Any:
    """As a session takes it: a text, a call, or several calls."""
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer


def _outside(value: float, limits: dict[str, Any]) -> str | None:
    if not value >= limits.get("at_least", -math.inf):  # also what is no number
        return f"is {value:.4g}, below {limits['at_least']}"
    if not value <= limits.get("at_most", math.inf):
        return f"is {value:.4g}, above {limits['at_most']}"
    return None
