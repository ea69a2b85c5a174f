"""`OnlineSession`: a model that is corrected learns at once, and tries again.

Knows: its two halves, talking and learning. Deliberately does not know: terminals, what tools do.
"""

import json
import logging
import math
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import set_seed

from ..files import attribute
from ..reprompt import well_formed
from . import storage
from .calls import ToolSet, dialect_of
from .config import changed_settings, check_online, online_config, settings_of
from .conversation import Answer, Conversation
from .journal import FORMAT, Journal
from .records import Attempt, AttemptChange, Message, Progress, SessionError, TokenChange
from .state import CUT_OFF, SessionState
from .trainer import OnlineTrainer
from .updates import Updates

logger = logging.getLogger(__name__)


class OnlineSession(Conversation):
    """
    A conversation with a local model that calls tools, in which a denied answer is learned from at once.

    `say` -> `respond` -> `approve`, or `deny` (with a correction) -> `learn` -> `retry`. One `learn` is one optimizer
    step of [`OnlineTrainer`], an `SDPOTrainer`: the model re-reads its own denied answers with the correction in its
    context, and moves towards what it then thinks. All of [`SDPOConfig`] counts: divergences, teachers, anchor
    (`beta`), gain, clips.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): As in [`SDPOTrainer`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): With a chat template. By default what comes with the model.
        args ([`SDPOConfig`], *optional*): By default [`online_config`].
        peft_config (`PeftConfig`, *optional*): A new adapter, as in [`SDPOTrainer`].
        tools (`Iterable[Callable]`, *optional*):
            What the model may call, see [`~sdpo_trl.online.calls.ToolSet`]. They run when a call is approved.
        messages (`Sequence[dict]`, *optional*): What the conversation begins with, say a system turn.
        journal (`str` or `Path`, *optional*):
            A file to which each event is appended, on the disk before it takes effect. If it holds a session, that one
            is continued where it was, also after a crash: conversation, pending answer, denied answers, and updates,
            which are made again (from the last saved folder that it names, if that is there).
        undo_depth (`int`, *optional*, defaults to `1`): Updates that can be taken back, each of which is kept whole.
        shares_prefixes (`bool`, *optional*, defaults to `True`): See [`OnlineTrainer`].

    Raises:
        `ValueError`: an option that a session could not honour, or a tokenizer without a chat template.
        `NotImplementedError`: a model that reads images, or several processes.
        [`SessionError`]: another session writes to the journal.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        args: Any = None,
        *,
        peft_config: Any = None,
        tools: Iterable[Callable[..., Any]] = (),
        messages: Sequence[Message] = (),
        journal: "str | Path | None" = None,
        undo_depth: int = 1,
        shares_prefixes: bool = True,
        _folder: Path | None = None,
    ) -> None:
        args = online_config() if args is None else args
        check_online(args)
        if undo_depth < 1:
            raise ValueError(f"`undo_depth` is at least 1, got {undo_depth}: what is interrupted is taken back, too.")
        self._tools = ToolSet(tools)
        set_seed(args.seed)  # a new adapter is the same one each time, so a journal leads to the same weights
        self.trainer = OnlineTrainer(
            model, args, processing_class=tokenizer, peft_config=peft_config, shares_prefixes=shares_prefixes
        )
        if self.trainer._is_vlm:
            raise NotImplementedError("A session speaks in text: models that read images are not supported.")
        if self.trainer.accelerator.num_processes > 1 or self.trainer.is_deepspeed_enabled:
            raise NotImplementedError("A session is one process: start it without a launcher, and without DeepSpeed.")
        self._dialect = dialect_of(
            self.trainer._tokenizer, self._tools, self.trainer.eos_token_ids, self.trainer.chat_template_kwargs
        )
        self._journal = None if journal is None else Journal(journal)
        self._learned: tuple[Attempt, ...] = ()
        try:
            self._require_same_tokens()
            self._updates = Updates(self.trainer, self._journal, undo_depth, _folder)
            self._state = self._restored(messages, _folder)
        except BaseException:
            if self._journal is not None:
                self._journal.close()
            raise
        self._settle(CUT_OFF)  # the process ended while a tool ran

    def _restored(self, messages: Sequence[Message], folder: Path | None) -> SessionState:
        """The state that the journal or the folder holds, or a new one, which the journal is told of."""
        state = SessionState()
        if self._journal is not None and self._journal.events:
            for number, event in enumerate(self._journal.events, 1):
                try:
                    state.apply(event)
                except (LookupError, TypeError, AttributeError) as error:
                    raise ValueError(
                        f"{self._journal.path}, line {number} ({event['event']}) does not follow from the lines "
                        f"before it ({type(error).__name__}: {error}). Was a line removed or changed?"
                    ) from error
            changed = changed_settings(self.trainer.args, self._journal.events[0]["settings"])
            if changed:
                logger.warning(f"The journal was begun with other options, so its updates may differ: {changed}.")
            self._journal.events.clear()
            return state
        if folder is not None:
            state = storage.state_of(folder)
        else:
            _require_turns(messages)
            state.start, state.messages = well_formed(list(messages)), well_formed(list(messages))
        if self._journal is not None:
            self._journal.write({
                "event": "opened", "format": FORMAT, "state": state.record(), "updates": self._updates.applied,
                "folder": None if folder is None else str(folder.absolute()),
                "settings": settings_of(self.trainer.args), "vocabulary": self._vocabulary(),
            })  # fmt: skip
        return state

    def _require_same_tokens(self) -> None:
        """Before the journal's updates are made again."""
        opened = {} if self._journal is None or not self._journal.events else self._journal.events[0]
        if opened.get("vocabulary", self._vocabulary()) != self._vocabulary():
            raise ValueError(
                f"{self._journal.path} is of a model with other tokens. Take that model, or another journal."
            )

    def _vocabulary(self) -> int:
        """A number that tells tokenizers apart: recorded ids mean something under one of them alone."""
        return zlib.crc32(json.dumps(sorted(self.trainer._tokenizer.get_vocab().items())).encode())

    # Learning

    @property
    def version(self) -> int:
        """Of the weights: counts up with each update and each undone one."""
        return self._updates.version

    @property
    def updates(self) -> int:
        """Updates in force."""
        return len(self._updates.applied)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What was logged of each update in force, oldest first."""
        return list(self._updates.metrics)

    @property
    def teacher(self) -> str:
        """Whose weights the teacher has."""
        return self.trainer._teacher_kind

    @property
    def can_undo(self) -> bool:
        """Whether the last update can be taken back."""
        return self._updates.can_undo

    def learn(self, on_progress: Callable[[Progress], None] | None = None) -> dict[str, Any]:
        """
        One update on the open episode: all denied answers to its prompt, whichever weights sampled them.

        Written to the journal before; if it breaks or is interrupted, the weights are as before.

        Args:
            on_progress (`Callable`, *optional*): Is told of each stage.

        Returns:
            `dict`: `loss`, `grad_norm`, `seconds` and the trainer's other metrics.

        Raises:
            [`SessionError`]: no answer was denied.
        """
        if not self.attempts:
            raise SessionError("There is nothing to learn from: deny an answer first.")
        prompt = self._dialect.view(self._state.episode.prompt)
        tools = {"tools": self._dialect.schemas} if self._dialect.schemas else {}
        rows = [
            {
                "prompt": prompt,
                **tools,
                "privileged_context": attempt.told,
                "demonstration": attempt.solution,
                "prompt_ids": list(attempt.reply.prompt_ids),
                "completion_ids": list(attempt.reply.ids),
                "logprobs": list(attempt.reply.logprobs),
            }
            for attempt in self.attempts
        ]
        logs = self._updates.learn(rows, on_progress)
        self._learned = self.attempts
        return logs

    def undo(self) -> None:
        """
        Take the last update back exactly: weights, optimizer, teacher, counters. The conversation stays.

        Raises:
            [`SessionError`]: there is none that could be.
        """
        self._updates.undo()
        self._learned = ()

    def changes(self) -> list[AttemptChange]:
        """
        What the last update changed, token by token of each denied answer it learned from.

        Raises:
            [`SessionError`]: nothing was learned since the session began.
        """
        if not self._learned:
            raise SessionError("Nothing was learned yet, so nothing was changed.")
        tokenizer, changes = self.trainer._tokenizer, []
        pairs = [(list(attempt.reply.prompt_ids), list(attempt.reply.ids)) for attempt in self._learned]
        after = self.trainer.log_probs(pairs)
        for attempt, seen, now in zip(self._learned, self._updates.tokens, after, strict=True):
            tokens = tuple(
                TokenChange(
                    tokenizer.decode([token.token]), token.before, token.teacher, now[token.place], token.divergence,
                    tokenizer.decode([token.wanted]),
                )
                for token in seen
            )  # fmt: skip
            changes.append(AttemptChange(attempt, tokens))
        return changes

    # Looking

    def score(self, answer: Answer, messages: Sequence[Message] | None = None) -> float:
        """
        The log-probability of an answer by the model as it is now, end token included, at the sampling temperature.

        Args:
            answer (`str`, [`Call`] or `Sequence[Call]`): As the model would write it.
            messages (`Sequence[dict]`, *optional*): What it answers; the conversation by default.
        """
        messages = self._state.messages if messages is None else messages
        prompt = self._prompt_ids(messages)
        ids = self._dialect.write(messages, self._dialect.message(answer))
        return math.fsum(self.trainer.log_probs([(prompt, ids)])[0])

    def next_token(self, messages: Sequence[Message] | None = None) -> torch.Tensor:
        """
        The log-probabilities of the first token of an answer, shape `(V,)`, at the sampling temperature.

        Args:
            messages (`Sequence[dict]`, *optional*): What is answered; the conversation by default.
        """
        messages = self._state.messages if messages is None else messages
        return self.trainer.next_tokens(self._prompt_ids(messages), [])[0]

    def next_tokens(self, answer: Answer, messages: Sequence[Message] | None = None) -> torch.Tensor:
        """
        The same at each of the `T` tokens of an answer (its end token too), shape `(T, V)`; arguments as in `score`.
        """
        messages = self._state.messages if messages is None else messages
        prompt = self._prompt_ids(messages)
        ids = self._dialect.write(messages, self._dialect.message(answer))
        return self.trainer.next_tokens(prompt, ids)[:-1]

    # Keeping

    def save(self, folder: "str | Path") -> None:
        """
        Write everything to a folder, whole or not at all: adapter (or model), teacher, optimizer, counters,
        conversation. PEFT and `SDPOTrainer.train(resume_from_checkpoint=...)` read it, too.

        Raises:
            `FileExistsError`: the folder holds something else.
            `ValueError`: the journal lies in it.
        """
        folder = Path(folder).absolute()
        if self._journal is not None and folder in self._journal.path.absolute().parents:
            raise ValueError(f"The journal lies in {folder}, which is replaced as a whole. Save to another folder.")
        storage.write(self.trainer, folder, {"state": self._state.record(), **self._updates.record()})
        self._record({"event": "saved", "folder": str(folder)})

    @classmethod
    def load(
        cls, folder: "str | Path", model: Any = None, tokenizer: Any = None, args: Any = None, **options: Any
    ) -> "OnlineSession":
        """
        A saved session, where it was: the same next-token distribution, teacher, optimizer and conversation.

        Args:
            folder (`str` or `Path`): What [`OnlineSession.save`] wrote.
            model (`str` or `PreTrainedModel`, *optional*): The base model; by default what the adapter names.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): By default the folder's.
            args ([`SDPOConfig`], *optional*): As when it was saved.
            options: `tools`, `journal`, `undo_depth`, `shares_prefixes`, as in the constructor. With the journal of
                the same session, what happened after it was saved is made again.

        Raises:
            `FileNotFoundError`, `ValueError`: there is none, it is incomplete, or it does not fit.
        """
        whole = storage.find(folder)
        adapter = storage.adapter_of(whole)
        if model is None:
            model = str(whole) if adapter is None else adapter.base_model_name_or_path
        if not model:
            raise ValueError(f"The adapter in {folder} does not know its base model. Give it: `load(folder, model)`.")
        tokenizer = storage.tokenizer_of(whole) if tokenizer is None else tokenizer
        return cls(model, tokenizer, args, peft_config=adapter, _folder=whole, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """
        Upload the adapter (or model), the tokenizer and a card; nothing of the conversation or the journal.

        Args:
            repo_id (`str`): On the Hub.
            options: Of `Trainer.push_to_hub`: `token`, `private`, `commit_message`, ...

        Returns:
            `CommitInfo`: of huggingface_hub.
        """
        trainer = self.trainer
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            stack.enter_context(attribute(trainer.args, "output_dir", folder))
            stack.enter_context(attribute(trainer.args, "hub_model_id", repo_id))
            stack.enter_context(attribute(trainer, "hub_model_id", None))
            return trainer.push_to_hub(**options)

    def close(self) -> None:
        """End the session: the journal may be written by another one, trackers are told."""
        if self._journal is not None:
            self._journal.close()
        trainer = self.trainer
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)

    def __enter__(self) -> "OnlineSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_turns(messages: Any) -> None:
    for turn in messages:
        if (
            not isinstance(turn, dict)
            or not isinstance(turn.get("role"), str)
            or not {"content", "tool_calls"} & turn.keys()
        ):
            raise TypeError(
                f"`messages` is a list of turns, each a dictionary with `role` and `content`, got {turn!r}."
            )
