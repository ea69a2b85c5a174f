"""The acting half of the trainer: rows become prompts, rows declare tools, interactions have limits.

Knows: TRL's rollouts and its tool loop. Deliberately does not know: feedback, teachers, losses.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from trl.data_utils import is_conversational

from . import rows as row_rules
from .agent_metrics import AgentMetrics, is_truncated
from .batches import position_limit
from .files import attribute
from .guarded_trainer import GuardedTrainer
from .reprompt import well_formed
from .tool_calls import (
    INVALID_CALL,
    ResponseReader,
    ToolBox,
    as_table_entry,
    invalid_tool_call,
    settle_observation,
)
from .turns import turn_starts

logger = logging.getLogger(__name__)


class AgentTrainer(GuardedTrainer):
    """
    GRPO that takes rows as people have them, and whose students read what went wrong with a tool call.

    [`SDPOTrainer`] sets the collaborators up; its docstring says what each override adds.
    """

    _distills: bool
    _batch_tools: "list[list[Any] | None] | None" = None  # what each row of the batch declares
    _reader: ResponseReader | None = None
    _cut_from: int | None = None  # as many tokens without an end are a turn that a limit cut
    _agent_metrics: AgentMetrics
    _masks_context: bool = False  # a `rollout_func` has told its own tokens from others, on some process

    @property
    def _acts(self) -> bool:
        """Whether a rollout may have several turns."""
        return bool(self.tools) or self.environment_factories is not None or self._masks_context

    def _set_up_agent(self) -> None:
        """After TRL's own set-up: the reader of tool calls, and the limit of a turn."""
        limit = self.args.max_turn_length
        if limit is not None:
            if not self.tools or self.rollout_func is not None:
                raise ValueError(
                    "`max_turn_length` needs `tools` or an environment with some, and no `rollout_func` (which "
                    "generates by itself): a single turn is limited by `max_completion_length`."
                )
            if self.use_vllm:
                self.vllm_generation.max_completion_length = limit
            else:
                self.generation_config.max_new_tokens = self.generation_kwargs["max_new_tokens"] = limit
        if self.args.max_observation_length is not None and not self.tools:
            raise ValueError(
                "`max_observation_length` cuts what tools reply: pass `tools` or an environment with some."
            )
        if self.tools:
            self._reader = ResponseReader(self._tokenizer, self.eos_token_ids)
            # Where nothing but an end token ends a turn, one without it was cut.
            stops = {"stop", "stop_strings", "stop_token_ids"} & (self.args.generation_kwargs or {}).keys()
            self._cut_from = limit if stops else 0
            self._reader.limit = self._cut_from
        self._agent_metrics = AgentMetrics(self.accelerator, [tool.__name__ for tool in self.tools])

    # Rows

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, "messages", "conversations", "tools"})

    def _generate_and_score_completions(self, inputs):
        inputs = [self._read_row(row, number) for number, row in enumerate(inputs)]
        if any("tools" in row for row in inputs):  # TRL takes the first row's columns for those of all
            inputs = [{"tools": None, **row} for row in inputs]
        if self.tools and self.rollout_func is None:
            text = next((number for number, row in enumerate(inputs) if isinstance(row.get("prompt"), str)), None)
            if text is not None:
                raise ValueError(
                    f"The prompt of row {text} of the batch is plain text, which has no place for tools and their "
                    'replies. Use messages: `[{"role": "user", "content": ...}]`.'
                )
        declared = [row_rules.declared_tools(row.get("tools")) for row in inputs]
        self._batch_tools = None
        if any(tools is not None for tools in declared):
            self._check_declared(declared, inputs)
            self._batch_tools = declared
        return super()._generate_and_score_completions(inputs)

    def _read_row(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        try:
            read = row_rules.prompt_row(row)
            if read.get("prompt") in (None, []) and self.environment_factories is None:
                raise ValueError("Its prompt is missing or has no message. Drop the row.")
            return read
        except ValueError as error:
            raise ValueError(f"Row {number} of the batch cannot be read. {error}") from error

    def _check_declared(self, declared: "list[list[Any] | None]", inputs: list[dict[str, Any]]) -> None:
        """Refuse a tool that nothing could run, and tools for a prompt that has no place for them."""
        for number, (tools, row) in enumerate(zip(declared, inputs, strict=True)):
            known = {tool.__name__ for tool in self._tools_in(row.get("environment"))}
            if tools and not is_conversational({"prompt": row.get("prompt", [{"role": "user", "content": ""}])}):
                raise ValueError(
                    f"Row {number} of the batch declares tools, but its prompt is plain text. Use messages."
                )
            missing = [name for name in map(row_rules.tool_name, tools or []) if name not in known]
            if missing and self.rollout_func is None:
                raise ValueError(
                    f"Row {number} of the batch declares the tool {missing[0]!r}, which nothing runs: it is neither "
                    f"among `tools=` nor a method of the environment (known: {', '.join(sorted(known)) or 'none'})."
                )
            named = [tool for tool in tools or [] if isinstance(tool, str) and tool in missing]
            if named:
                raise ValueError(
                    f"Row {number} of the batch declares the tool {named[0]!r} by its name alone, and no function has "
                    f"it (known: {', '.join(sorted(known)) or 'none'}). Give its JSON schema, which the prompt shows."
                )

    def _tools_in(self, environment: str | None) -> list[Any]:
        """The functions that a row can call: all, or with several environments those of its own."""
        if self.environment_factories is None:
            return list(self.tools)
        return self._env_tools.get(environment if self._multi_environment else None, [])  # TRL refuses unknown ones

    @contextmanager
    def _only_rows(self, rows: Sequence[int]) -> Iterator[None]:
        """Within, TRL's prompts are those of some rows of the batch, with their environments and tools."""
        with ExitStack() as stack:
            if self.environment_factories is not None:
                chosen = [self._batch_environments[i] for i in rows]
                stack.enter_context(attribute(self, "_batch_environments", chosen))
            if self._batch_tools is not None:
                stack.enter_context(attribute(self, "_batch_tools", [self._batch_tools[i] for i in rows]))
            yield

    def _tokenize_prompts(self, prompts):
        declared = self._batch_tools
        if declared is None:
            return super()._tokenize_prompts(prompts)
        if len(declared) != len(prompts):
            raise ValueError(
                f"The batch has {len(declared)} rows with tools of their own, but {len(prompts)} prompts."
            )
        groups: dict[str, list[int]] = {}
        for i, tools in enumerate(declared):
            groups.setdefault(json.dumps([tools, str(self._environment_of(i))], sort_keys=True), []).append(i)
        ids: list[Any] = [None] * len(prompts)
        fields: dict[str, list[Any]] = {}
        for rows in groups.values():
            with self._describing(self._environment_of(rows[0]), declared[rows[0]]), self._only_rows(rows):
                made, images, more = super()._tokenize_prompts([prompts[i] for i in rows])
            if images is not None or any(not isinstance(value, list) for value in more.values()):
                raise NotImplementedError("Rows with images cannot declare tools of their own. Drop their `tools`.")
            for name, values in {"": made, **more}.items():
                target = ids if name == "" else fields.setdefault(name, [None] * len(prompts))
                for i, value in zip(rows, values, strict=True):
                    target[i] = value
        return ids, None, fields

    def _environment_of(self, row: int) -> str | None:
        return None if self.environment_factories is None else self._batch_environments[row]

    @contextmanager
    def _describing(self, environment: str | None, declared: "list[Any] | None") -> Iterator[None]:
        """Within, TRL describes the declared tools in the prompt; `None`: all that there are."""
        if declared is None:
            yield
            return
        acts_in_one = self.environment_factories is not None
        own = self._env_tools[environment] if acts_in_one else []
        by_name = {tool.__name__: tool for tool in [*self.tools, *own]}
        described = [by_name[tool] if isinstance(tool, str) else tool for tool in declared]
        name, value = (
            ("_env_tools", {**self._env_tools, environment: described}) if acts_in_one else ("tools", described)
        )
        with attribute(self, name, value):
            yield

    # Turns

    def _generate(self, prompts):
        if self._distills:
            prompts[:] = [well_formed(prompt) for prompt in prompts]  # an environment may have added to them
        self._tool_calls, self._tool_successes = Counter(), Counter()
        self._call_count = self._failure_count = 0
        with self._reader.reading() if self._distills and self.tools else nullcontext():
            output = super()._generate(prompts)
        if self.rollout_func is not None:
            _check_masks(*output[1:3])
            masks = torch.tensor([output[2] is not None], device=self.accelerator.device)
            self._masks_context |= bool(self.accelerator.gather(masks).any())
        if self._distills and self._acts:
            self._count_rollouts(output)
        return output

    def _count_rollouts(self, output: tuple[Any, ...]) -> None:
        """Note what the rollouts of one batch were like."""
        _, completion_ids, sampled, completions, *_ = output
        masks = [[1] * len(ids) for ids in completion_ids] if sampled is None else sampled
        end_ids = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        cut = [is_truncated(*row, end_ids) for row in zip(completions, completion_ids, strict=True)]
        sums = {
            "turns": sum(len(turn_starts(mask)) for mask in masks),
            "tool_calls": self._call_count,
            "tool_failures": self._failure_count,
            "assistant_tokens": sum(map(sum, masks)),
            "truncated_share": sum(cut),
        }
        mode = "train" if self.model.training else "eval"
        self._agent_metrics.add_rollouts(mode, sums, len(masks), self._tool_calls, self._tool_successes)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if self._reader is not None:
            self._reader.limit = self._cut_from
        with self._within_positions(prompt_ids) if self._distills else nullcontext():
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )

    @contextmanager
    def _within_positions(self, prompt_ids: Sequence[Sequence[int]]) -> Iterator[None]:
        """
        Refuse a prompt that fills the model's positions, and within, generate no further than they reach.

        vLLM has a limit of its own. Elsewhere the rows of one call are generated together, so the longest of them
        limits all.
        """
        positions = position_limit(self.model.config)
        longest = max(map(len, prompt_ids))
        if min(map(len, prompt_ids)) == 0:
            row = next(i for i, ids in enumerate(prompt_ids) if not ids)
            raise ValueError(
                f"The prompt of row {row} of the batch is empty: there is no token to go on from. Drop the row."
            )
        if positions is not None and longest >= positions:
            # TRL's tool loop has already ended the interactions that are this long, so this is a prompt of the batch.
            row = next(i for i, ids in enumerate(prompt_ids) if len(ids) >= positions)
            raise ValueError(
                f"The prompt of row {row} of the batch has {len(prompt_ids[row])} tokens, which leaves no room for an "
                f"answer within the model's {positions} positions. Shorten or drop it: nothing is cut from a prompt."
            )
        if self.use_vllm or positions is None or longest + self.generation_config.max_new_tokens <= positions:
            yield
            return
        logger.warning(
            f"A prompt of {longest} tokens leaves {positions - longest} of the model's {positions} positions, so all "
            "answers that are generated with it end there."
        )
        if self._reader is not None and self._cut_from != 0:
            self._reader.limit = positions - longest
        with attribute(self.generation_config, "max_new_tokens", positions - longest):
            yield

    def _get_tool_suffix_ids(self, tool_messages):
        if self._distills:
            for observation in tool_messages:
                settle_observation(observation, self.args.max_observation_length)
        return super()._get_tool_suffix_ids(tool_messages)

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields):
        self._allow_declared_tools()
        result = super()._tool_call_loop(
            prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields
        )
        self._call_count, self._failure_count = result[4], result[5]
        return result

    def _allow_declared_tools(self) -> None:
        """Give TRL's loop the tools that each row declares; where it distills, in boxes that count and catch."""
        for name in ("_sync_tool_dicts", "_async_tool_dicts"):
            callable_tools = getattr(self, name)
            boxes: list[dict[str, Any]] = []
            for tools, functions in zip(
                self._batch_tools or [None] * len(callable_tools), callable_tools, strict=True
            ):
                allowed = None if tools is None else {row_rules.tool_name(tool) for tool in tools}
                chosen = {key: tool for key, tool in functions.items() if allowed is None or key in allowed}
                if self._distills:
                    if name == "_sync_tool_dicts":
                        chosen[INVALID_CALL] = invalid_tool_call
                    chosen = ToolBox(chosen, self._tool_calls, self._tool_successes, sees=self._is_vlm)
                boxes.append(chosen)
            setattr(self, name, boxes)

    # Logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if not self.log_completions:
            super().log(logs, start_time)
            return
        shown = {
            **self._logs,
            "prompt": [as_table_entry(entry) for entry in self._logs["prompt"]],
            "completion": [as_table_entry(entry) for entry in self._logs["completion"]],
            "extra": {name: well_formed(list(values)) for name, values in self._logs["extra"].items()},
        }
        with attribute(self, "_logs", shown):
            super().log(logs, start_time)


def _check_masks(completion_ids: "list[list[int]]", masks: "list[list[int]] | None") -> None:
    """Refuse an `env_mask` that is not one number per token: TRL would take the tokens it lacks for sampled ones."""
    if masks is None:
        return
    if len(masks) != len(completion_ids):
        raise ValueError(
            f"`rollout_func` gave {len(masks)} rows of `env_mask` and {len(completion_ids)} of `completion_ids`."
        )
    for row, (ids, mask) in enumerate(zip(completion_ids, masks, strict=True)):
        if len(mask) != len(ids):
            raise ValueError(
                f"`rollout_func` gave {len(mask)} values of `env_mask` for the {len(ids)} tokens of row {row}. Give 1 "
                "for each token that the model sampled, and 0 for each other one."
            )
        if any(value not in (0, 1) for value in mask):
            raise ValueError(f"`rollout_func` gave an `env_mask` of row {row} with other values than 0 and 1.")
