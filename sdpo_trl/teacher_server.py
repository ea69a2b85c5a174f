"""The live teacher scored by the vLLM server that generates, instead of by a pass of its own here.

Knows: TRL's client, which requests are made when. Deliberately does not know: what the teacher is told, losses.
"""

from typing import Any

import torch
from trl.generation import vllm_client

from .batches import student_positions, teacher_view
from .divergence import IMPOSSIBLE
from .served_head import ServedHead


class ServerPass:
    """
    Stands where [`~sdpo_trl.teacher_pass.TeacherPass`] does. Each process asks for its own rows.

    Args:
        trainer ([`SDPOTrainer`]): With `use_teacher_server=True`.

    Raises:
        `ValueError`: what cannot be scored there: images, or a server with other settings.
    """

    reads_student = True

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        if trainer._is_vlm:
            raise ValueError(
                "`use_teacher_server=True` sends token ids, which a vision model's images are not. Leave it off: the "
                "teacher then runs here."
            )
        self._trainer = trainer
        size = trainer._known_tokens
        self._topk = min(args.distillation_topk, size) if args.distillation_mode == "topk_logits" else 1
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self._client = vllm_client.VLLMClient(base_url=url, connection_timeout=args.vllm_server_timeout)
        self._check(self._client.get_server_info()["model_config"], url)

    def _check(self, config: dict[str, Any], url: str) -> None:
        if config["logprobs_mode"] in ("raw_logits", "processed_logits"):
            raise ValueError(
                f"The vLLM server at {url} gives logits (`--logprobs-mode {config['logprobs_mode']}`), and "
                "`use_teacher_server=True` needs log-probabilities. Restart it with `--logprobs-mode "
                "processed_logprobs`."
            )
        most = config["max_logprobs"]
        if 0 <= most < self._topk:
            raise ValueError(
                f"The vLLM server at {url} gives at most {most} log-probabilities per token, and "
                f"`distillation_topk` asks for {self._topk}. Restart it with `--max-logprobs {self._topk}` (or -1)."
            )

    def cached(self, output: dict[str, Any], active: torch.Tensor) -> dict[str, torch.Tensor]:
        """Nothing is scored before the loss asks."""
        return {}

    def head(self, inputs: dict[str, Any], active: torch.Tensor) -> ServedHead:
        """
        What the server says of the active tokens; the student's weights are sent first if they have moved.

        Args:
            inputs (`dict`): A micro-batch.
            active (`torch.Tensor`): bool of shape `(B, T)`.

        Raises:
            `ValueError`: the server gave no log-probability for an active token.
        """
        self._send_current_weights()
        rows = active.any(dim=1).nonzero().squeeze(1)
        read = teacher_view(inputs)
        told = read["completion_ids"].new_zeros(len(rows), read["completion_ids"].size(1), 2 * self._topk + 1).double()
        told[...] = -torch.inf  # of a token: its log-probability, those of the likeliest items, their ids
        if rows.numel():
            self._ask(read, rows, told)
        told = student_positions(told, inputs, rows)[active[rows]]  # (n, 2 K + 1)
        own, log_probs, ids = told[:, 0].float(), told[:, 1 : self._topk + 1].float(), told[:, self._topk + 1 :]
        if not torch.isfinite(own).all():
            raise ValueError(
                "The vLLM server gave no log-probability for a token of an answer. Does it serve the student's model, "
                "and with `--logprobs-mode processed_logprobs`?"
            )
        log_probs = log_probs.clamp(min=IMPOSSIBLE)
        return ServedHead(inputs["completion_ids"][active], own, ids.long(), log_probs, self._trainer._known_tokens)

    def _send_current_weights(self) -> None:
        """A rollout batch may be trained on for several steps; between them the server lags behind."""
        trainer = self._trainer
        if trainer.state.global_step == trainer._last_loaded_step:
            return
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
        trainer.accelerator.wait_for_everyone()  # the main process sends; nobody asks before it is done

    def _ask(self, read: dict[str, Any], rows: torch.Tensor, told: torch.Tensor) -> None:
        """Fill `(R, T', 2 K + 1)` up to each row's last token."""
        sequences, starts = [], []
        for row in rows.tolist():
            prompt = read["teacher_prompt_ids"][row][read["teacher_prompt_mask"][row].bool()].tolist()
            used = read["completion_mask"][row].bool().nonzero()[-1].item() + 1
            sequences.append(prompt + read["completion_ids"][row, :used].tolist())
            starts.append(len(prompt))
        answer = self._client.get_sequence_logprobs(
            sequences, starts, top_logprobs=self._topk, temperature=self._trainer.temperature
        )
        keys = ("actual_logprobs", "logprobs", "logprob_token_ids")
        for place, parts in enumerate(zip(*(answer[key] for key in keys), strict=True)):
            values = torch.cat([torch.tensor(part, dtype=told.dtype) for part in parts], dim=1)
            told[place, : len(values)] = values.to(told.device)
