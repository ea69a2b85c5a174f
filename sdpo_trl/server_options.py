"""The option that has vLLM's server score for the teacher, off by default.

Knows: names, which options it excludes. Deliberately does not know: servers, tensors.
"""

from dataclasses import dataclass, field


@dataclass
class ServerOptions:
    """
    The part of [`SDPOConfig`] for scoring on vLLM's server.

    Parameters:
        use_teacher_server (`bool`, *optional*, defaults to `False`):
            The server that generates also scores the answers under the teacher's prompts, with the student's current
            weights, so no teacher's pass runs here (as in TRL). Needs `use_vllm=True`, `vllm_mode="server"`,
            `teacher_model_kind="live"`, `temperature=1.0` and `distillation_mode` `"sampled_token"`, or
            `"topk_logits"`, which then compares over the *teacher's* `distillation_topk` likeliest items: a server
            tells no others. The server must run with `--max-logprobs` of at least that number.
    """

    use_teacher_server: bool = field(
        default=False, metadata={"help": "Score for the live teacher on the vLLM server that generates."}
    )

    def _check_server_pairs(self) -> None:
        if not self.use_teacher_server:
            return
        for holds, needs, why in (
            (self.use_vllm and self.vllm_mode == "server", "`use_vllm=True` and `vllm_mode='server'`",
             "the server that generates is asked"),
            (self.distillation_weight > 0.0, "a `distillation_weight` above 0", "without it nothing is scored"),
            (self.teacher_model_kind == "live", "`teacher_model_kind='live'`",
             "the server holds the student's current weights and no others"),
            (self.distillation_signal == "loss", "`distillation_signal='loss'`",
             "the divergence that is logged beside an advantage needs the whole distribution"),
            (self.distillation_mode != "full_logits", "`distillation_mode` 'topk_logits' or 'sampled_token'",
             "a server tells a few log-probabilities per token, not all of them"),
            (self.temperature == 1.0, "`temperature=1.0`",
             "vLLM gives a prompt's log-probabilities at that temperature, whatever it is asked for"),
            (self.distillation_temperature is None, "`distillation_temperature=None`",
             "another temperature needs the whole distribution"),
            (self.token_weighting != "teacher_entropy", "another `token_weighting` than 'teacher_entropy'",
             "the teacher's entropy needs the whole distribution"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"`use_teacher_server=True` needs {needs}: {why}. Change that, or drop the option.")
