"""Every option does something, alone, or is refused with a message that says what to do; and the public names."""

import dataclasses
import functools
import inspect
import logging
import os
import threading

import fake_vllm
import pytest
import tiny
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, TrlParser

import sdpo_trl
from sdpo_trl import SDPOConfig, SDPOTrainer, feedback_reverse_kl, select_feedback
from sdpo_trl.agent_options import AgentOptions
from sdpo_trl.controls import ControlOptions
from sdpo_trl.faults import FaultOptions
from sdpo_trl.server_options import ServerOptions

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

# A group with successes (one of them by manners alone, one whose thinking never ends) and one without.
ANSWERS = ["<think>a</think>ok$", "no$", "pq$", "<think>ok$", "no$", "bad$", "nah$", "xx$"]


def graded(completions, log_extra, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("feedback", [f"you wrote {text}" for text in texts])
    return [1.0 if "ok" in text else 0.0 for text in texts]


def polite(completions, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [1.0 if text.startswith("p") else 0.0 for text in texts]


def in_the_main_thread(completions, **kwargs):
    return [float(threading.current_thread() is threading.main_thread())] * len(completions)


class BrokenGradient(TrainerCallback):
    """The second step's gradient is NaN."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            self.hook = parameter.register_hook(lambda gradient: gradient * float("nan"))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.hook.remove()


def hopeless(completions, **kwargs):
    return [0.0] * len(completions)


def behaviour(folder, monkeypatch, caplog, reward=None, evaluates=False, **options):
    """What a run of three steps does, in its parts."""
    monkeypatch.undo()
    caplog.clear()
    options = {
        "max_steps": 3,
        "max_completion_length": 40,
        "learning_rate": 1e-2,
        "trainer_rollout_func": tiny.scripted(ANSWERS),
        **options,
    }
    reference, prompts, answers = [], [], []
    plain = sdpo_trl.scores.reference_scores
    monkeypatch.setattr("sdpo_trl.scores.reference_scores", lambda *args: (reference.append(1), plain(*args))[1])
    server = fake_vllm.FakeServer(tiny.build_model())
    if options.get("use_vllm"):
        server.install(monkeypatch)
    trainer = tiny.trainer(folder, reward or [graded, polite], **options)
    compute = trainer._compute_loss

    def watched(model, inputs):
        hints = trainer._tokenizer.batch_decode(inputs["teacher_prompt_ids"])
        available = inputs["feedback_available"].tolist()
        answers.append(inputs["completion_ids"].tolist())
        prompts.append(
            [hint.replace("<pad>", "") if told else None for hint, told in zip(hints, available, strict=True)]
        )
        return compute(model, inputs)

    if trainer._distills:
        trainer._compute_loss = watched
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        trainer.train()
    logs = tiny.training_logs(trainer)
    external = trainer._distills and not trainer._stores and trainer.args.teacher_model_kind != "live"
    return {
        "loss": [row["loss"] for row in logs],
        "logs": [{key: value for key, value in row.items() if key.startswith("sdpo/")} for row in logs],
        "prompts": prompts,
        "first prompts": prompts[:1],
        "answers": answers,
        "teacher": {n: v.clone() for s in getattr(trainer, "_stores", {}).values() for n, v in s._values.items()},
        "offloaded": [store._offload for store in getattr(trainer, "_stores", {}).values()],
        "teacher dtype": trainer._teacher._model.dtype if external else None,
        "warnings": caplog.text.count("SDPO: for"),
        "evaluation": sorted(trainer.evaluate(tiny.prompts())) if evaluates else None,
        "reference": bool(reference),
        "requests": len(server.requests),
    }


def two_questions():
    """Two questions of one topic: the first one asked is solved in the first batch, the other never."""
    return Dataset.from_list([{"prompt": prompt, "topic": "t"} for prompt in ("ab", "cd")])


def same(first, second):
    if isinstance(first, dict) and any(isinstance(value, torch.Tensor) for value in first.values()):
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return first == second


@dataclasses.dataclass
class Case:
    """An option's other value, what must change with it, and what must stand beside it for it to mean anything."""

    value: object
    changes: str
    beside: dict = dataclasses.field(default_factory=dict)


TOPK = {"distillation_mode": "topk_logits", "distillation_topk": 5}
CASES = {
    "distillation_weight": Case(0.5, "loss"),
    "distillation_mode": Case("sampled_token", "loss", {"distillation_alpha": 1.0}),
    "distillation_alpha": Case(1.0, "loss"),
    "distillation_topk": Case(9, "loss", TOPK),
    "distillation_add_tail": Case(False, "loss", TOPK),
    "distillation_is_clip": Case(0.7, "loss", {"num_iterations": 3}),
    "distillation_impl": Case("reference", "reference"),
    "teacher_model_kind": Case("live", "loss"),
    "teacher_update_rate": Case(0.9, "teacher"),
    "teacher_sync_steps": Case(3, "teacher"),
    "teacher_mix": Case(0.6, "loss", {"teacher_model_kind": "trust_region"}),
    "teacher_offload": Case(True, "offloaded"),
    "teacher_model_init_kwargs": Case({"dtype": "bfloat16"}, "teacher dtype", {"trainer_teacher_model": "FOLDER"}),
    "success_reward_threshold": Case(-1.0, "first prompts"),
    "success_reward_func": Case("graded", "first prompts"),
    "use_successful_as_teacher": Case(False, "first prompts"),
    "dont_reprompt_on_self_success": Case(False, "first prompts"),
    "include_environment_feedback": Case(False, "first prompts"),
    "environment_feedback_only_without_solution": Case(False, "first prompts"),
    "remove_thinking_from_demonstration": Case(False, "first prompts"),
    "reprompt_placement": Case("append", "first prompts", {"data": tiny.prompts(chat=True)}),
    "max_reprompt_len": Case(130, "first prompts"),
    "reprompt_template": Case("{solution}!{prompt}!{feedback}", "first prompts"),
    "solution_template": Case("<{successful_previous_attempt}>", "first prompts"),
    "feedback_template": Case("<{feedback_raw}>", "first prompts"),
    "diagnostics_warning_interval": Case(1, "warnings", {"reward": hopeless}),
    "diagnostics_flat_tolerance": Case(1e9, "warnings", {"diagnostics_warning_interval": 1}),
}
LINEAR = {"distillation_weight_schedule": "linear"}
BUFFER = {"success_buffer_size": 2, "data": two_questions()}
CASES |= {
    "distillation_routing": Case("failed", "first prompts"),
    "distillation_weight_schedule": Case("cosine", "loss"),
    "distillation_weight_end": Case(0.4, "loss", LINEAR),
    "distillation_weight_warmup_steps": Case(2, "loss"),
    "distillation_weight_decay_steps": Case(1, "loss", LINEAR),
    "prompt_weighting": Case("difficulty", "first prompts"),
    "token_weighting": Case("gap_gate", "loss"),
    "token_weighting_beta": Case(3.0, "loss", {"token_weighting": "teacher_entropy"}),
    "distillation_log_ratio_clip": Case(0.01, "loss"),
    "distillation_log_ratio_clip_running": Case(0.5, "loss"),
    "distillation_is_clip_low": Case(0.999, "loss", {"num_iterations": 3, "distillation_is_clip": None}),
    "distillation_gain_target": Case(5.0, "loss"),
    "distillation_gain_max": Case(2.0, "loss", {"distillation_gain_target": 100.0}),
    "distillation_signal": Case("advantage_magnitude", "loss"),
    "advantage_magnitude_clip": Case(0.001, "loss", {"distillation_signal": "advantage_magnitude"}),
    "teacher_proximal_share": Case(0.3, "loss"),
    "teacher_snapshot_gate": Case(True, "teacher", {"teacher_model_kind": "snapshot", "teacher_sync_steps": 1}),
    "demonstration_choice": Case("random", "prompts", {"dont_reprompt_on_self_success": False}),
    "success_buffer_size": Case(1, "prompts", {"data": two_questions()}),
    "success_buffer_questions": Case(1, "prompts", {**BUFFER, "data": tiny.prompts(), "max_steps": 8}),
    "success_buffer_max_age": Case(1, "prompts", {**BUFFER, "max_steps": 5}),
    "success_buffer_key": Case("topic", "prompts", {**BUFFER, "data": tiny.prompts(topic=["t"] * 4)}),
    "reward_timeout": Case(600.0, "first prompts", {"reward": in_the_main_thread}),
    "max_nonfinite_steps": Case(0, "loss", {"trainer_callbacks": [BrokenGradient()]}),
    "evaluate_teacher": Case(False, "evaluation", {"trainer_rollout_func": None, "evaluates": True}),
}


def look() -> str:
    """Look around."""
    return "there is a long hall"


LOOKING = ['<tool_call>{"name": "look", "arguments": {}}</tool_call>$', "no$"]
ACTING = {
    "data": tiny.prompts(chat=True),
    "trainer_tools": [look],
    "trainer_processing_class": tiny.tool_tokenizer(),
    "trainer_rollout_func": tiny.scripted(LOOKING),
    "max_completion_length": 100,
}


def told_late(prompts, completions, rewards, **columns):
    return [[(1, "look twice")] if len(turns) > 2 else None for turns in completions]


TOLD = {**ACTING, "trainer_feedback_func": told_late, "reward": hopeless}
CASES |= {
    "teacher_context": Case("none", "first prompts", {"trainer_teacher_model": "FOLDER"}),
    "distillation_temperature": Case(2.0, "loss"),
    "distillation_span": Case("hinted_turn", "loss", TOLD),
    "turn_feedback_template": Case("<{feedback_raw}>", "loss", TOLD),
    "max_turn_length": Case(3, "answers", {**ACTING, "trainer_rollout_func": None}),
    "max_observation_length": Case(8, "answers", ACTING),
}
SERVER = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_importance_sampling_correction": False,
    "teacher_model_kind": "live",
    "distillation_mode": "sampled_token",
    "distillation_alpha": 1.0,
}
CASES |= {"use_teacher_server": Case(True, "requests", SERVER)}
NEW_FIELDS = sorted(
    {f.name for f in dataclasses.fields(SDPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)}
)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    tiny.build_model(seed=7).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", NEW_FIELDS)
def test_every_option_changes_something_when_it_is_changed_alone(tmp_path, monkeypatch, caplog, teacher_folder, name):
    assert name in CASES, f"add to CASES what `{name}` changes"
    case = CASES[name]
    beside = {key: teacher_folder if value == "FOLDER" else value for key, value in case.beside.items()}
    default = behaviour(tmp_path / "a", monkeypatch, caplog, **beside)
    again = behaviour(tmp_path / "a", monkeypatch, caplog, **beside)
    changed = behaviour(tmp_path / "b", monkeypatch, caplog, **{**beside, name: case.value})
    assert same(default[case.changes], again[case.changes]), "the run is not deterministic"
    assert not same(default[case.changes], changed[case.changes])
    if case.changes in ("loss", "teacher", "reference"):
        assert default["first prompts"] == changed["first prompts"]


def test_no_entry_is_left_over():
    assert sorted(CASES) == NEW_FIELDS


def test_what_the_teacher_is_told_under_each_option(tmp_path, monkeypatch, caplog):
    def first(**options):
        rows = behaviour(tmp_path, monkeypatch, caplog, max_steps=1, **options)["first prompts"][0]
        return sorted(str(row) for row in rows)

    def with_text(rows, *texts):
        return sum(all(text in row for text in texts) for row in rows)

    solution, feedback = "Correct solution:", "you wrote"
    default = first()
    # Three successes: `ok` and `pq` can be shown, the one that never stopped thinking cannot. `pq` shows itself to
    # `ok`, `ok` to the three others; the other group has texts alone.
    assert with_text(default, solution) == 4 and with_text(default, feedback) == 4
    assert with_text(default, solution, feedback) == 0
    assert with_text(default, solution, "\nok\n") == 3 and with_text(default, solution, "\npq\n") == 1
    assert with_text(default, "<think>") == 0
    by_grade = first(success_reward_func="graded")
    assert with_text(by_grade, solution, "pq") == 0 and with_text(by_grade, solution, "ok") == 3
    assert with_text(by_grade, feedback) == 5  # `ok` itself is told only its own text
    assert with_text(first(environment_feedback_only_without_solution=False), solution, feedback) == 4
    assert with_text(first(use_successful_as_teacher=False), feedback) == 8
    silent = first(include_environment_feedback=False)
    assert with_text(silent, feedback) == 0 and silent.count("None") == 4
    itself = first(dont_reprompt_on_self_success=False)
    assert with_text(itself, solution, "\nok\n") == 3 and with_text(itself, solution, "\npq\n") == 1
    assert with_text(first(remove_thinking_from_demonstration=False), "<think>a</think>ok") == 3


# Refused

UNSHOWN = {"use_successful_as_teacher": False}
UNTOLD = {"include_environment_feedback": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_weight": 1.5}, r"`distillation_weight` must be in \[0, 1\], got 1.5"),
        ({"distillation_weight": float("nan")}, r"must be in \[0, 1\]"),
        ({"distillation_alpha": -0.1}, r"`distillation_alpha` must be in \[0, 1\]"),
        ({"teacher_update_rate": 2.0}, r"`teacher_update_rate` must be in \[0, 1\]"),
        ({"teacher_mix": -1.0, "teacher_model_kind": "trust_region"}, r"`teacher_mix` must be in \[0, 1\]"),
        ({"distillation_topk": 0, "distillation_mode": "topk_logits"}, "`distillation_topk` must be at least 1"),
        ({"teacher_sync_steps": 0}, "`teacher_sync_steps` must be at least 1"),
        ({"max_reprompt_len": 0}, "`max_reprompt_len` must be at least 1"),
        ({"distillation_is_clip": 0.0}, "must be positive, got 0.0. `None` does not cut"),
        ({"diagnostics_warning_interval": -1}, "must not be negative"),
        ({"diagnostics_flat_tolerance": -1.0}, "must not be negative"),
        ({"reward_timeout": 0}, "`reward_timeout` must be positive seconds, got 0. `None` waits"),
        ({"reward_timeout": float("inf")}, "`reward_timeout` must be positive seconds"),
        ({"max_nonfinite_steps": -1}, "`max_nonfinite_steps` must be whole and not negative, got -1"),
        ({"distillation_mode": "topk"}, "must be one of full_logits, topk_logits, sampled_token, got 'topk'"),
        ({"distillation_impl": "fast"}, "must be one of"),
        ({"teacher_model_kind": "moving"}, "must be one of live, base, ema, snapshot, trust_region, got 'moving'"),
        ({"reprompt_placement": "first"}, "must be one of last_user, append"),
        ({"distillation_mode": "topk_logits"}, "needs `distillation_topk`"),
        ({"distillation_topk": 5}, "`distillation_topk=5` has no effect.*topk_logits"),
        ({"distillation_add_tail": False}, "`distillation_add_tail=False` has no effect.*topk_logits"),
        ({"distillation_mode": "sampled_token"}, r"set `distillation_alpha=1.0` \(got 0.5\)"),
        ({"teacher_model_kind": "snapshot"}, "needs `teacher_sync_steps`"),
        ({"teacher_model_kind": "live", "teacher_update_rate": 0.1}, "no effect.*`teacher_model_kind='ema'`"),
        ({"teacher_model_kind": "snapshot", "teacher_sync_steps": 2, "teacher_update_rate": 0.1}, "no effect.*'ema'"),
        ({"teacher_model_kind": "base", "teacher_sync_steps": 5}, "no effect.*'ema' or 'snapshot'"),
        ({"teacher_mix": 0.5}, "no effect.*trust_region"),
        ({**UNSHOWN, "dont_reprompt_on_self_success": False}, "use_successful_as_teacher=True"),
        ({**UNTOLD, "environment_feedback_only_without_solution": False}, "include_environment_feedback=True"),
        ({**UNTOLD, "feedback_template": "{feedback_raw}"}, "include_environment_feedback=True"),
        ({"diagnostics_warning_interval": 0, "diagnostics_flat_tolerance": 1e-3}, "diagnostics_warning_interval"),
        ({"epsilon": 0.1}, "`epsilon=0.1` has no effect.*policy term"),
        ({"epsilon_high": 0.3}, "no effect.*policy term"),
        ({"delta": 2.0}, "no effect.*policy term"),
        ({"importance_sampling_level": "sequence"}, "no effect.*policy term"),
        ({"off_policy_mask_threshold": 0.5}, "no effect.*policy term"),
        ({"top_entropy_quantile": 0.5}, "no effect.*policy term.*or an entropy bonus"),
        ({"num_generations": 1, "distillation_weight": 0.5}, "at least 2 generations"),
        ({"num_generations": 1, "distillation_weight": 0.0}, "at least 2 generations"),
        ({"teacher_context": "all"}, "`teacher_context` must be one of feedback, none, got 'all'"),
        ({"teacher_context": "none", "distillation_weight": 0.0}, "no effect.*`distillation_weight` above 0"),
        ({"teacher_context": "none", "max_reprompt_len": 99}, "no effect.*`teacher_context='feedback'`"),
        ({"teacher_context": "none", "success_buffer_size": 1}, "no effect.*`teacher_context='feedback'`"),
        ({"distillation_temperature": 0.0}, "`distillation_temperature` must be a positive number or `None`, got 0.0"),
        ({"distillation_span": "last"}, "must be one of all, from_hint, hinted_turn, got 'last'"),
        ({**UNTOLD, "distillation_span": "from_hint"}, "include_environment_feedback=True"),
        ({**UNTOLD, "turn_feedback_template": "<{feedback_raw}>"}, "include_environment_feedback=True"),
        ({"turn_feedback_template": "<>"}, "`turn_feedback_template` lacks the slot {feedback_raw}"),
        ({"max_turn_length": 0}, "`max_turn_length` must be whole and at least 1, got 0"),
        ({"max_turn_length": 7}, "more than the whole rollout may have.*`max_completion_length=6`"),
        ({"max_turn_length": 3, "generation_kwargs": {"max_new_tokens": 3}}, "say the same. Drop one"),
        ({"max_observation_length": True}, "`max_observation_length` must be whole and at least 1, got True"),
        ({"max_observation_length": 9, "distillation_weight": 0.0}, "no effect.*`distillation_weight` above 0"),
        ({"distillation_temperature": 2.0, "distillation_weight": 0.0}, "no effect.*`distillation_weight` above 0"),
        ({"reprompt_template": "{prompt}{feedback}"}, "`reprompt_template` lacks the slot {solution}"),
        ({"max_completion_length": None}, "`max_completion_length` must be a number"),
        ({"max_completion_length": None, "distillation_weight": 0.0, "max_turn_length": 3}, "must be a number"),
        ({"distillation_weight": True}, r"`distillation_weight` must be in \[0, 1\], got True"),
        ({"max_reprompt_len": True}, "`max_reprompt_len` must be at least 1 and whole, got True"),
        ({"max_reprompt_len": None}, "`max_reprompt_len` must be at least 1 and whole, got None"),
        ({"distillation_is_clip": "2"}, "`distillation_is_clip` must be positive, got '2'"),
        ({"diagnostics_warning_interval": None}, "must not be negative, got None"),
        ({"diagnostics_warning_interval": 1.5}, "must be whole, got 1.5"),
        ({"success_reward_threshold": "1"}, "`success_reward_threshold` must be a number, got '1'"),
        ({"success_reward_threshold": float("nan")}, "`success_reward_threshold` must be a number, got nan"),
        ({"reprompt_template": None}, "`reprompt_template` must be a text, got None"),
        ({"turn_feedback_template": 5}, "`turn_feedback_template` must be a text, got 5"),
        ({"success_reward_func": 5}, "`success_reward_func` must be a text or `None`, got 5"),
        ({"teacher_offload": "false"}, "`teacher_offload` must be `True` or `False`, got 'false'"),
        ({"evaluate_teacher": None}, "`evaluate_teacher` must be `True` or `False`, got None"),
        ({"reprompt_template": "nothing"}, r"lacks the slot {prompt}, {solution}, {feedback}"),
        ({"solution_template": "it: {solution}"}, "`solution_template` lacks the slot {successful_previous_attempt}"),
        ({"feedback_template": "it: {feedback}"}, "`feedback_template` lacks the slot {feedback_raw}"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_contradictions_are_refused_when_the_options_are_made(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"distillation_weight": 0.5, "epsilon": 0.1, "delta": 2.0},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
        {"distillation_is_clip": None},
        {"num_generations": 1},
        {"teacher_model_kind": "trust_region", "teacher_mix": 1.0},
        {"teacher_update_rate": 0.0},
        {"loss_type": "luspo"},
    ],
    ids=str,
)
def test_what_is_not_refused(tmp_path, options):
    config = tiny.config(tmp_path, **options)
    for name, value in options.items():
        assert getattr(config, name) == value
    assert type(config.num_generations) is int


def feedback(prompts, completions, rewards, **columns):
    return [None] * len(prompts)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trainer_feedback_func": "text"}, TypeError, "`feedback_func` must be callable, got str"),
        (
            {"trainer_feedback_func": feedback, "include_environment_feedback": False},
            ValueError,
            "would never be read: set `include_environment_feedback=True`",
        ),
        ({"trainer_feedback_func": feedback, "distillation_weight": 0.0}, ValueError, "is GRPO: drop `feedback_func`"),
        (
            {"trainer_teacher_model": "somewhere", "distillation_weight": 0.0},
            ValueError,
            "is GRPO: drop `feedback_func` and `teacher_model`",
        ),
        ({"teacher_model_init_kwargs": {"dtype": "auto"}}, ValueError, "no effect without `teacher_model`"),
        (
            {"trainer_teacher_model": "somewhere", "teacher_model_kind": "base"},
            ValueError,
            "never moves, so `teacher_model_kind` has no effect",
        ),
        (
            {"trainer_teacher_model": "somewhere", "teacher_update_rate": 0.1},
            ValueError,
            "never moves, so `teacher_update_rate` has no effect",
        ),
        (
            {"trainer_teacher_model": tiny.build_model(), "teacher_model_init_kwargs": {"dtype": "auto"}},
            ValueError,
            "is for a `teacher_model` given as a path",
        ),
        ({"teacher_context": "none"}, ValueError, "needs a `teacher_model`.*would teach nothing"),
        (
            {"teacher_context": "none", "trainer_teacher_model": "somewhere", "trainer_feedback_func": feedback},
            ValueError,
            "`feedback_func` would never be read: set `teacher_context='feedback'`",
        ),
        ({"max_turn_length": 3}, ValueError, "`max_turn_length` needs `tools`"),
        ({"max_observation_length": 3}, ValueError, "`max_observation_length` cuts what tools reply"),
        ({"success_reward_func": "missing"}, ValueError, "Yours are: even_length"),
    ],
)
def test_contradictions_are_refused_when_the_trainer_is_made(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        tiny.trainer(tmp_path, **options)


@pytest.mark.parametrize("make", [GRPOConfig, TrainingArguments])
def test_other_arguments_are_refused(tmp_path, make):
    args = make(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=f"must be an `SDPOConfig`, got {make.__name__}"):
        SDPOTrainer(
            tiny.build_model(), tiny.never, args, train_dataset=tiny.prompts(), processing_class=tiny.build_tokenizer()
        )


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    tiny.build_model().save_pretrained(tmp_path / "base")
    tiny.trained_adapter().save_pretrained(tmp_path / "adapter")
    base = tiny.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    frozen = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="is_trainable=True"):
        tiny.trainer(tmp_path, model=frozen)
    with pytest.raises(ValueError, match="Nothing in the model trains"):
        tiny.trainer(tmp_path, model=tiny.build_model().requires_grad_(False))
    base = tiny.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tiny.trainer(tmp_path, model=PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True))


def test_default_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_cpu = functools.partial(SDPOConfig, use_cpu=True, bf16=False)
    monkeypatch.setattr("sdpo_trl.trainer.SDPOConfig", on_cpu)
    tiny.build_model().save_pretrained(tmp_path / "student")
    tiny.build_tokenizer().save_pretrained(tmp_path / "student")
    trainer = SDPOTrainer("student", tiny.never, train_dataset=tiny.prompts())
    assert trainer.args.output_dir == "student-SDPO" and isinstance(trainer.args, SDPOConfig)


# The parser


OTHER_VALUES = {name: case.value for name, case in CASES.items()} | {
    "distillation_mode": "topk_logits",
    "distillation_topk": 7,
    "distillation_is_clip": None,
    "teacher_model_kind": "ema",
    "teacher_mix": 0.01,
    "feedback_template": "\n<{feedback_raw}>\n",
    "include_environment_feedback": True,
    "use_successful_as_teacher": True,
    "distillation_signal": "loss",
    "advantage_magnitude_clip": 0.2,
    "distillation_gain_target": None,
    "distillation_gain_max": 10.0,
    "teacher_snapshot_gate": False,
    "teacher_context": "feedback",
    "turn_feedback_template": "<{feedback_raw}>",
    "max_turn_length": 5,
    "use_teacher_server": False,
}


def test_the_parser_reads_every_option_from_yaml(tmp_path):
    import yaml

    path = tmp_path / "options.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "bf16": False, "use_cpu": True, **OTHER_VALUES}))
    (config,) = TrlParser([SDPOConfig]).parse_args_and_config(args=["--config", str(path)])
    assert {name: getattr(config, name) for name in NEW_FIELDS} == OTHER_VALUES
    (config,) = TrlParser([SDPOConfig]).parse_args_and_config(
        args=["--config", str(path), "--distillation_alpha", "0.25", "--distillation_topk", "3"]
    )
    assert (config.distillation_alpha, config.distillation_topk) == (0.25, 3)


def test_the_parser_reads_every_option_from_the_command_line(tmp_path):
    values = {**OTHER_VALUES, "distillation_is_clip": 1.5}
    del values["distillation_gain_target"]  # `None` is its default
    args = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "true"]
    for name, value in values.items():
        args += [f"--{name}", str(value).replace("'", '"')]
    (config,) = TrlParser([SDPOConfig]).parse_args_and_config(args=args)
    assert {name: getattr(config, name) for name in values} == values


def test_every_option_has_help_and_is_documented():
    for field in dataclasses.fields(SDPOConfig):
        if field.name in NEW_FIELDS:
            assert field.metadata["help"]
            classes = (SDPOConfig, ControlOptions, AgentOptions, FaultOptions, ServerOptions)
            documented = "".join(cls.__doc__ for cls in classes)
            assert f"        {field.name} (`" in documented


# Public names


def test_public_names():
    assert sdpo_trl.__all__ == ["SDPOConfig", "SDPOTrainer", "feedback_reverse_kl", "select_feedback"]
    assert issubclass(SDPOTrainer, GRPOTrainer) and issubclass(SDPOConfig, GRPOConfig)


def test_public_signatures():
    def parameters(function):
        return {
            name: (p.kind.name, p.default)
            for name, p in inspect.signature(function).parameters.items()
            if name != "self"
        }

    positional, keyword, empty = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY", inspect.Parameter.empty
    assert parameters(select_feedback) == {
        "question_ids": (positional, empty),
        "success": (positional, empty),
        "rich_feedback": (positional, empty),
        "exclude_self": (keyword, False),
    }
    names = ["student_logits", "teacher_logits", "token_mask", "feedback_available"]
    assert parameters(feedback_reverse_kl) == dict.fromkeys(names, (positional, empty))
    ours = parameters(SDPOTrainer.__init__)
    assert list(ours)[:3] == list(parameters(GRPOTrainer.__init__))[:3] == ["model", "reward_funcs", "args"]
    assert ours["feedback_func"] == ours["teacher_model"] == (keyword, None)
    others = {kind for kind, _ in list(ours.values())[3:]}
    assert others == {"VAR_POSITIONAL", keyword, "VAR_KEYWORD"}  # all of GRPO's own, by name or place


def test_grpo_arguments_pass_by_place(tmp_path):
    trainer = SDPOTrainer(
        tiny.build_model(), tiny.never, tiny.config(tmp_path), tiny.prompts(4), tiny.prompts(2), tiny.build_tokenizer()
    )
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (4, 2)
