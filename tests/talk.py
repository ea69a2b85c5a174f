"""Sessions for tests: the tiny model, tools that note what they did, and answers that are given instead of sampled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny

from sdpo_trl.online import OnlineSession, OnlineTrainer, conversation, online_config

SYSTEM = {"role": "system", "content": "be good"}
PLAIN = '<tool_call>{"name": "write_file", "arguments": {"path": "a.txt", "text": "hello"}}</tool_call>$'
BROKEN = '<tool_call>{"name": "write_file", "arg</tool_call>$'
FAILING = '<tool_call>{"name": "write_file", "arguments": {"path": "no", "text": "x"}}</tool_call>$'


class Files:
    """Two tools, and what they wrote."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def write_file(self, path: str, text: str) -> str:
        """
        Write a file.

        Args:
            path: Where.
            text: What.
        """
        if path == "no":
            raise ValueError("nothing can be written there. Take another path.")
        self.written.append((path, text))
        return f"wrote {path}"

    def count(self) -> int:
        """Count the files."""
        return len(self.written)

    @property
    def tools(self) -> list[Callable[..., Any]]:
        return [self.write_file, self.count]


def options(folder: Path | str, **overrides: Any):
    return online_config(
        str(folder),
        **{
            "max_completion_length": 100, "learning_rate": 1e-2, "teacher_model_kind": "ema", "disable_tqdm": True,
            "use_cpu": True, "bf16": False, **overrides,
        },
    )  # fmt: skip


def session(folder: Path | str, *, model: Any = None, files: Files | None = None, **given: Any) -> OnlineSession:
    """On the tiny model with LoRA; `session_*` go to the session, the others to the configuration."""
    extra = {name[8:]: given.pop(name) for name in list(given) if name.startswith("session_")}
    model = tiny.build_model(max_position_embeddings=4096) if model is None else model
    defaults = {"peft_config": tiny.lora(), "tools": (files or Files()).tools, "messages": [SYSTEM]}
    tokenizer = extra.pop("tokenizer", None) or tiny.tool_tokenizer()
    return OnlineSession(model, tokenizer, options(folder, **given), **{**defaults, **extra})


def answering(monkeypatch: Any, *answers: str) -> list[str]:
    """The next answers, instead of sampled ones; more may be added to the list. `$` is the end token."""
    left = list(answers)

    def sample(trainer, prompt_ids, count, on_text=None):
        made = []
        for _ in range(count):
            ids = tiny.answer_ids(trainer._tokenizer, left.pop(0))
            made.append((ids, trainer.log_probs([(prompt_ids, ids)])[0]))
        return made

    monkeypatch.setattr(conversation, "sample", sample)
    return left


def trainer(folder: Path | str, model: Any, shares: bool = True, peft: Any = None, **given: Any) -> OnlineTrainer:
    """Opened."""
    made = OnlineTrainer(
        model, options(folder, **given), processing_class=tiny.build_tokenizer(), shares_prefixes=shares,
        peft_config=peft,
    )  # fmt: skip
    made.open()
    return made


def rows(
    trainer: OnlineTrainer, answers: list[str], question: str = "do something long and interesting"
) -> list[dict]:
    """Recorded answers to one prompt, by the weights of now, each with a text of its own."""
    messages = [SYSTEM, {"role": "user", "content": question}]
    prompt = trainer.prompt_ids(messages, [])
    made = []
    for number, text in enumerate(answers):
        ids = tiny.answer_ids(trainer._tokenizer, text)
        made.append({
            "prompt": messages, "privileged_context": f"not {number}, other", "prompt_ids": prompt,
            "completion_ids": ids, "logprobs": trainer.log_probs([(prompt, ids)])[0],
        })  # fmt: skip
    return made
