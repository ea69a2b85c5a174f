"""Feedback written by a language model behind any OpenAI-compatible endpoint.

Knows: failures, requests, costs. Deliberately does not know: trainers, and columns of the dataset: the model is shown
the problem, the answer and the error text that the reward gave, so it cannot pass on hidden tests or right answers.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..feedback import check_texts
from ..reprompt import Prompt, completion_text, message_text
from .code_feedback import cut, printable

logger = logging.getLogger(__name__)

INSTRUCTIONS = (
    "You review answers that failed. You are given a problem, an answer, and what its check reported. Explain in at "
    "most six sentences what is wrong with the answer and why, pointing at the step or line where it goes wrong, and "
    "name the idea that it misses. Do not give the solution: no corrected code, no final answer, no complete method. "
    "Write to the author of the answer, without praise and without headings."
)
_LEFT_OUT = "(code left out)"


@dataclass
class Costs:
    """
    What was asked and spent so far, by this process.

    Args:
        calls (`int`): Failed answers about which the model was asked.
        explained (`int`): Texts that it gave.
        fell_back (`int`): Answers that got the raw error instead, because the endpoint failed, timed out or gave
            nothing; `calls = explained + fell_back`.
        prompt_tokens, completion_tokens (`int`): As the endpoint counts them; what failed requests cost is not known.
    """

    calls: int = 0
    explained: int = 0
    fell_back: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class LLMFeedback:
    """
    An async `feedback_func` that has failures explained; where that fails, the raw error stands in, and is counted.

    The reward's own text (`log_extra("feedback", ...)`) is the raw error. `wrap` keeps it back from the trainer, so
    that the explanation takes its place:

    ```python
    explain = LLMFeedback("qwen3-32b", base_url="http://localhost:8000/v1", api_key="none")
    trainer = SDPOTrainer(..., reward_funcs=explain.wrap(CodeReward()), feedback_func=explain)
    ```

    Answers are explained if the wrapped reward gave a text about them, or, without a wrapped reward, if their reward
    is below `success_reward`.

    Args:
        model (`str`): Name of the model at the endpoint.
        base_url (`str`, *optional*), api_key (`str`, *optional*): As of `openai.AsyncOpenAI`, which reads the
            environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY`) if they are not given.
        concurrency (`int`): Requests at once.
        timeout_seconds (`float`): For one request.
        retries (`int`): Further tries after a time-out, a lost connection, or the statuses 408, 409, 429 and 5xx, with
            exponential back-off or after the time that the endpoint names.
        total_seconds (`float`, *optional*): For all tries of one answer; by default what the time-outs add up to, and
            10 s for each pause.
        success_reward (`float`): See above.
        include_error (`bool`): Put the raw error before the explanation.
        characters (`int`): Budget of each part of the request (problem, answer, error) and of the text that comes
            back.
        request (`dict`, *optional*): Further fields of the request, such as `max_tokens` or `temperature`.

    Raises:
        `ImportError`: the client library is missing.
        `ValueError`: there is no key, or a number is out of its range.
        `openai.OpenAIError`: when called, if the very first requests are refused because of the key, the model's name
            or the form of the request: such a run would never explain anything.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout_seconds: float = 60.0,
        retries: int = 3,
        total_seconds: float | None = None,
        success_reward: float = 1.0,
        include_error: bool = False,
        characters: int = 6000,
        request: dict[str, Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                "LLMFeedback uses the client library `openai`, which is not installed: `pip install 'sdpo-trl[llm]'`."
            ) from error
        for name, value, least in (("concurrency", concurrency, 1), ("retries", retries, 0)):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        for name, value in (("timeout_seconds", timeout_seconds), ("characters", characters)):
            if value <= 0:
                raise ValueError(f"`{name}` must be above 0, got {value}.")
        self._openai = openai
        self.model = model
        self.concurrency = concurrency
        self.total_seconds = total_seconds or timeout_seconds * (retries + 1) + 10 * retries
        self.success_reward = success_reward
        self.include_error = include_error
        self.characters = characters
        self.request = {"max_tokens": 512, **(request or {})}
        self.costs = Costs()
        self._client = {"base_url": base_url, "api_key": api_key, "timeout": timeout_seconds, "max_retries": retries}
        try:
            openai.AsyncOpenAI(**self._client)
        except openai.OpenAIError as error:
            raise ValueError(
                f"There is no key for the endpoint that explains failures ({base_url or 'of OpenAI'}). Set the "
                "environment variable OPENAI_API_KEY, or `api_key`; any text will do where the endpoint asks for none."
            ) from error
        self._raw: list[str | None] | None = None
        self._wrapped = False

    def wrap(self, reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """The same reward function, whose feedback texts come here instead of to the trainer."""
        call = getattr(reward, "__call__", None)  # noqa: B004 - whether it is async, not whether it is there
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call) or self._wrapped:
            raise TypeError("`wrap` takes one reward function, which is not async.")
        self._wrapped = True

        def wrapped(*arguments: Any, log_extra: Callable[[str, list[Any]], None] | None = None, **columns: Any) -> Any:
            kept: list[Any] = []

            def keep(name: str, values: list[Any]) -> None:
                if name == "feedback":
                    kept.extend(values)
                elif log_extra is not None:
                    log_extra(name, values)

            rewards = reward(*arguments, log_extra=keep, **columns)
            kept = kept or [None] * len(rewards)  # it had nothing to say about any of them
            self._raw = check_texts(kept, len(rewards), "The wrapped reward's `log_extra('feedback', ...)`")
            return rewards

        # Also whether it must be called in the main thread, see `reward_timeout`.
        functools.update_wrapper(wrapped, reward, assigned=("__name__", "__doc__", "limits_itself"), updated=())
        return wrapped

    async def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], rewards: Sequence[float], **columns: Any
    ) -> list[str | None]:
        """One text per rollout, `None` for those that did not fail. The columns of the dataset are not read."""
        raw, self._raw = self._raw, None
        if self._wrapped:
            if raw is None or len(raw) != len(prompts):
                raise RuntimeError("The wrapped reward function must have graded these very rollouts before.")
            failed = [text is not None for text in raw]
        else:
            raw = [None] * len(prompts)
            failed = [not reward >= self.success_reward for reward in rewards]
        slots = asyncio.Semaphore(self.concurrency)
        # A client of its own for each batch: connections belong to the event loop that made them.
        async with self._openai.AsyncOpenAI(**self._client) as client:

            async def explain(row: int) -> str | None:
                if not failed[row]:
                    return None
                async with slots:
                    return await self._explain(client, prompts[row], completions[row], raw[row])

            tasks = [asyncio.ensure_future(explain(row)) for row in range(len(prompts))]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _explain(self, client: Any, prompt: Prompt, completion: Prompt, error: str | None) -> str | None:
        self.costs.calls += 1
        try:
            ask = client.chat.completions.create(
                model=self.model, messages=self._messages(prompt, completion, error), **self.request
            )
            reply = await asyncio.wait_for(ask, self.total_seconds)
            text = self._text(reply)
        # ValueError: not even JSON, or of another shape; a RecursionError comes from JSON of too many brackets.
        except (self._openai.OpenAIError, asyncio.TimeoutError, ValueError, RecursionError) as problem:
            refused = (self._openai.AuthenticationError, self._openai.PermissionDeniedError,
                       self._openai.NotFoundError, self._openai.BadRequestError)  # fmt: skip
            if isinstance(problem, refused) and not self.costs.explained:
                raise
            text, reason = None, f"{type(problem).__name__}: {problem}"
        else:
            reason = "the reply holds no text"
        if text is None:
            self.costs.fell_back += 1
            logger.warning("No explanation (%d of %d so far): %s", self.costs.fell_back, self.costs.calls, reason)
            return error
        self.costs.explained += 1
        return f"{error}\n\n{text}" if self.include_error and error else text

    def _messages(self, prompt: Prompt, completion: Prompt, error: str | None) -> list[dict[str, str]]:
        if not isinstance(prompt, str):
            prompt = "\n\n".join(f"[{turn['role']}]\n{message_text(turn.get('content'))}" for turn in prompt)
        parts = [("Problem", prompt), ("Answer", completion_text(completion)), ("The check reported", error)]
        body = "\n\n".join(f"# {name}\n\n{cut(printable(text), self.characters)}" for name, text in parts if text)
        return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": body}]

    def _text(self, reply: Any) -> str | None:
        """What the model wrote, without code blocks: they would be the solution that it was told to leave out."""
        if not isinstance(reply, self._openai.types.chat.ChatCompletion):
            raise ValueError("the endpoint's reply is no chat completion")
        try:  # the client library checks no fields, and not every server keeps to their types
            reply = reply.model_dump(mode="python", warnings=False)
            usage = reply.get("usage") or {}
            tokens = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
            content = reply["choices"][0]["message"]["content"] if reply.get("choices") else None
            text = without_code(message_text(content)).strip()
            self.costs.prompt_tokens += int(tokens[0])
            self.costs.completion_tokens += int(tokens[1])
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the endpoint's reply is no chat completion ({type(error).__name__}: {error})"
            ) from error
        return cut(printable(text), self.characters) if text.replace(_LEFT_OUT, "").strip() else None


def without_code(text: str) -> str:
    """
    `text` without its fenced blocks, also in lists and quotes or opened behind words, each replaced by a remark; one
    that never closes ends with the text.
    """
    kept: list[str] = []
    fence = ""  # the one that is open
    for line in text.splitlines():
        bare = line.strip(" \t>")
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
            continue
        mark = max(("```", "~~~"), key=line.rfind)
        before, _, behind = line.rpartition(mark)
        if mark not in line or mark[0] in behind or mark in before:  # none, or code within a line
            kept.append(line)
            continue
        words = before.rstrip(mark[0])
        fence = (len(before) - len(words)) * mark[0] + mark
        kept.append(f"{words}{_LEFT_OUT}")
    return "\n".join(kept)
