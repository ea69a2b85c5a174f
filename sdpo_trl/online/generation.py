"""Answers are sampled, streamed, and their log-probabilities noted while they are.

Knows: the trainer's model and generation options. Deliberately does not know: messages, tools.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer, TextStreamer

from ..divergence import safe_log_softmax, upcast
from ..prefixes import EncodedPrefixes
from ..teacher import evaluation_mode


class _Pieces(TextStreamer):
    """Whole pieces of text, as soon as no later token can change them."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """`TextStreamer` prints."""
        if text:
            self._on_text(text)


class _Recorder(BaseStreamer):
    """
    Notes each sampled token's log-probability by the model's raw logits at the sampling temperature, which is what
    the loss compares with (TRL ignores `top_p` and its like there, too).
    """

    def __init__(self, temperature: float, pieces: _Pieces | None) -> None:
        self._temperature = temperature
        self._pieces = pieces
        self._waiting: deque[torch.Tensor] = deque()  # the device may be one step ahead of the tokens
        self._prompt_seen = False
        self.log_probs: list[torch.Tensor] = []  # per step, `(n,)`

    def hook(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Of the model's forward."""
        self._waiting.append(safe_log_softmax(upcast(output.logits[:, -1]) / self._temperature))

    def put(self, value: torch.Tensor) -> None:
        """One step's tokens, `(n,)`; at first the prompt."""
        if self._pieces is not None:
            self._pieces.put(value)
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        scores = self._waiting.popleft()
        self.log_probs.append(scores.gather(-1, value.to(scores.device)[:, None])[:, 0].cpu())

    def end(self) -> None:
        """The last text."""
        if self._pieces is not None:
            self._pieces.end()


@torch.no_grad()
def sample(
    trainer: Any, prompt_ids: list[int], count: int, on_text: Callable[[str], None] | None = None
) -> list[tuple[list[int], list[float]]]:
    """
    Answers to one prompt by the model as it is now, with the trainer's generation options.

    The prompt is encoded once for all of them, where a cache can stand for it.

    Args:
        trainer ([`OnlineTrainer`]): Whose model.
        prompt_ids (`list[int]`): Generation header included.
        count (`int`): Answers, at least 1.
        on_text (`Callable`, *optional*): Gets pieces of the text as they come; for one answer.

    Returns:
        `list`: per answer its ids, up to and with the end token, and their log-probabilities.
    """
    model, bare = trainer.model, trainer._tap.model
    pieces = None if on_text is None else _Pieces(trainer._tokenizer, on_text)
    recorder = _Recorder(trainer.temperature, pieces)
    ids = torch.tensor([prompt_ids] * count, device=trainer.accelerator.device)
    with evaluation_mode(model), trainer.accelerator.autocast():
        options: dict[str, Any] = {}
        if count > 1 and len(prompt_ids) > 1 and trainer._teacher_pass.can_share:
            options = _encoded(model, bare, prompt_ids, count, ids.device)
        hook = bare.register_forward_hook(recorder.hook)
        try:
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=trainer.generation_config,
                streamer=recorder, **options,
            )  # fmt: skip
        finally:
            hook.remove()
    ends = set(trainer.eos_token_ids)
    steps = torch.stack(recorder.log_probs, dim=1).tolist()  # (count, T)
    answers = []
    for row, values in zip(made[:, len(prompt_ids) :].tolist(), steps, strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append((row[:length], values[:length]))
    return answers


def _encoded(model: Any, bare: Any, prompt_ids: list[int], count: int, device: torch.device) -> dict[str, Any]:
    """`generate`'s argument that holds all but the prompt's last token, once for each answer."""
    encoded = EncodedPrefixes.of(model, bare, [prompt_ids[:-1]], device)
    return {encoded.argument: encoded.cache([0] * count)}
