"""The two pages about moving here: their scripts run, their tables are true, their keys become options that exist."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import tiny
import yaml

from sdpo_trl import SDPOConfig

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.sdpo import SDPOConfig as TRLConfig

DOCS = Path(__file__).parent.parent / "docs"
FIELDS = {field.name: field for field in dataclasses.fields(SDPOConfig)}


def default(config, name):
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def codes(cell):
    return re.findall(r"`([^`]*)`", cell)


def tables(page):
    """The rows of a page's tables, cells by the heading above each table."""
    heading, rows = "", []
    for line in (DOCS / page).read_text().splitlines():
        heading = line if line.startswith("#") else heading
        if line.startswith("| `"):
            rows.append((heading, [cell.strip() for cell in line.strip("|").split("|")]))
    return rows


def literal(text, like):
    """A value as the page writes it: text stays text, the rest is Python's (or YAML's) notation."""
    return text if isinstance(like, str) else yaml.safe_load(text.replace("None", "null"))


# From TRL


def trl_rows(heading):
    return [cells for title, cells in tables("from_trl.md") if heading in title]


def test_the_table_of_defaults_has_exactly_those_that_differ():
    names = [field.name for field in dataclasses.fields(TRLConfig)]
    differ = {n: (default(TRLConfig, n), default(SDPOConfig, n)) for n in names if n in FIELDS}
    differ = {name: values for name, values in differ.items() if values[0] != values[1]}
    said = {}
    for name, theirs, ours in trl_rows("Other defaults"):
        name = codes(name)[0]
        said[name] = tuple(literal(codes(c)[0], like) for c, like in zip((theirs, ours), differ[name], strict=True))
    assert {name: tuple(map(float_or_same, values)) for name, values in said.items()} == differ


def float_or_same(value):
    """YAML reads `5e-5` as text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\de-\d", value) else value


def test_the_table_of_what_is_gone_is_complete():
    gone = {field.name for field in dataclasses.fields(TRLConfig)} - FIELDS.keys()
    assert {codes(cells[0])[0] for cells in trl_rows("No longer there")} == gone


def test_the_logs_that_are_named_exist(tmp_path):
    trainer = tiny.trainer(tmp_path, tiny.telling(), max_steps=1, log_completions=False)
    trainer.train()
    logged = tiny.training_logs(trainer)[0]
    for _, ours in trl_rows("Logs"):
        assert codes(ours)[0].replace("NAME", trainer.reward_func_names[0]) in logged


OLD = "from trl.experimental.sdpo import SDPOConfig, SDPOTrainer"


@pytest.mark.parametrize("line", [OLD, "from sdpo_trl import SDPOConfig, SDPOTrainer"], ids=["theirs", "ours"])
def test_the_script_runs_with_only_the_import_changed(tmp_path, line):
    script = re.search(r"```python\n(.*?)```", (DOCS / "from_trl.md").read_text(), re.DOTALL)[1]
    assert OLD in script and line in script  # the page says what to write instead
    tiny.build_model().save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    here = {
        OLD: line,
        '"Qwen/Qwen3-0.6B"': repr(str(tmp_path / "model")),
        '"out",': f"{str(tmp_path / 'out')!r}, use_cpu=True, bf16=False, max_steps=2, logging_steps=1, seed=0,"
        'report_to="none", save_strategy="no",',
        "max_completion_length=64": "max_completion_length=6",
    }
    for old, new in here.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    names = {}
    exec(compile(script, "from_trl.md", "exec"), names)
    trainer = names["trainer"]
    assert type(trainer).__module__.split(".")[0] == line.split()[1].split(".")[0]
    assert trainer.state.global_step == 2
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2
    if line != OLD:
        logs = tiny.training_logs(trainer)
        assert all(row["sdpo/feedback_share"] == row["sdpo/distilled_share"] == 1.0 for row in logs)
        assert all(row["sdpo/divergence"] > 0 for row in logs)
        args = trainer.args
        assert (args.distillation_mode, args.distillation_topk, args.teacher_sync_steps) == ("topk_logits", 20, 1)


# From the paper's code

# Keys of the paper's configuration with the values of its run with rich feedback, where a tiny run can have them.
THEIRS = """
actor_rollout_ref.actor.policy_loss.loss_mode=sdpo
actor_rollout_ref.actor.self_distillation.full_logit_distillation=True
actor_rollout_ref.actor.self_distillation.distillation_topk=20
actor_rollout_ref.actor.self_distillation.distillation_add_tail=True
actor_rollout_ref.actor.self_distillation.alpha=1.0
actor_rollout_ref.actor.self_distillation.is_clip=2
actor_rollout_ref.actor.self_distillation.success_reward_threshold=0.5
actor_rollout_ref.actor.self_distillation.ema_update_rate=0.01
actor_rollout_ref.actor.self_distillation.teacher_regularization=ema
actor_rollout_ref.actor.self_distillation.dont_reprompt_on_self_success=True
actor_rollout_ref.actor.self_distillation.remove_thinking_from_demonstration=True
actor_rollout_ref.actor.self_distillation.include_environment_feedback=True
actor_rollout_ref.actor.self_distillation.environment_feedback_only_without_solution=True
actor_rollout_ref.actor.self_distillation.max_reprompt_len=400
actor_rollout_ref.actor.optim.lr=1.0e-6
actor_rollout_ref.actor.optim.weight_decay=0.01
actor_rollout_ref.actor.optim.lr_warmup_steps=0
actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.ppo_epochs=1
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.temperature=1.0
actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.rollout.val_kwargs.n=4
data.max_response_length=6
data.shuffle=True
algorithm.norm_adv_by_std_in_grpo=False
trainer.total_training_steps=2
"""
# All that its `SelfDistillationConfig` has, in either of its two versions.
SELF_DISTILLATION = [
    "full_logit_distillation", "alpha", "success_reward_threshold", "teacher_regularization", "teacher_update_rate",
    "ema_update_rate", "distillation_topk", "distillation_add_tail", "max_reprompt_len", "reprompt_truncation",
    "dont_reprompt_on_self_success", "remove_thinking_from_demonstration", "is_clip", "reprompt_template",
    "solution_template", "feedback_template", "include_environment_feedback",
    "environment_feedback_only_without_solution",
]  # fmt: skip


def paper_rows():
    """`(their full key, our option, rule)` of each row; a heading with several keys names their common parent."""
    rows = []
    for heading, (key, option, rule) in tables("from_paper_code.md"):
        sections = codes(heading)
        parent = sections[0] if len(sections) == 1 else sections[0].rpartition(".")[0]
        rows.append((".".join(filter(None, [parent, codes(key)[0]])), codes(option)[0], rule))
    return rows


def values_of(rule):
    """What a rule turns into what: `{theirs: ours}`."""
    return dict(re.findall(r"(?:`([^`]*)`|number) → `([^`]*)`", rule))


def translate(theirs, rows):
    options, left = {}, set(theirs)
    for key, option, rule in rows:
        if key not in theirs:
            continue
        left.discard(key)
        value = theirs[key]
        if rule != "same":
            found = values_of(rule)
            if "" in found and isinstance(value, int):
                found[str(value)] = found[""]
            value = literal(found[str(value)], default(SDPOConfig, option)) if str(value) in found else None
        if value is not None:
            options[option] = value
    assert not left, f"on no table of the page: {left}"
    return options


def test_a_configuration_of_the_papers_code_is_translated_by_the_page_and_runs(tmp_path):
    theirs = dict(line.split("=") for line in THEIRS.split())
    theirs = {key: yaml.safe_load(value) for key, value in theirs.items()}
    options = translate(theirs, paper_rows())
    assert options == {
        "distillation_weight": 1.0, "distillation_mode": "topk_logits", "distillation_topk": 20,
        "distillation_add_tail": True, "distillation_alpha": 1.0, "distillation_is_clip": 2,
        "success_reward_threshold": 0.5, "teacher_update_rate": 0.01, "teacher_model_kind": "ema",
        "dont_reprompt_on_self_success": True, "remove_thinking_from_demonstration": True,
        "include_environment_feedback": True, "environment_feedback_only_without_solution": True,
        "max_reprompt_len": 400, "learning_rate": 1e-6, "weight_decay": 0.01, "warmup_steps": 0, "loss_type": "dapo",
        "entropy_coef": 0, "beta": 0.0, "num_iterations": 1, "num_generations": 8, "temperature": 1.0, "top_k": 0,
        "num_generations_eval": 4, "max_completion_length": 6, "shuffle_dataset": True, "scale_rewards": "none",
        "max_steps": 2,
    }  # fmt: skip
    trainer = tiny.trainer(tmp_path, tiny.telling(), **options)
    trainer.train()
    logs = tiny.training_logs(trainer)
    assert len(logs) == 2 and all(row["sdpo/distilled_share"] == 1.0 for row in logs)
    assert all(row["sdpo/divergence"] > 0 for row in logs)


def test_a_translation_of_other_values(tmp_path):
    prefix = "actor_rollout_ref.actor.self_distillation."
    theirs = {"full_logit_distillation": False, "distillation_topk": None, "alpha": 1.0}
    theirs |= {"teacher_regularization": "trust-region"}
    options = translate({prefix + key: value for key, value in theirs.items()}, paper_rows())
    assert options == {
        "distillation_mode": "sampled_token", "distillation_alpha": 1.0, "teacher_model_kind": "trust_region"
    }  # fmt: skip
    tiny.config(tmp_path, **options)


def test_every_key_of_the_page_becomes_an_option_with_valid_values(tmp_path):
    beside = {
        "topk_logits": {"distillation_topk": 5},
        "sampled_token": {"distillation_alpha": 1.0},
        "distillation_topk": {"distillation_mode": "topk_logits"},
    }
    for key, option, rule in paper_rows():
        assert option in FIELDS, f"`{key}` becomes `{option}`, which is no option"
        assert rule == "same" or values_of(rule), f"`{key}`: the rule {rule!r} cannot be read"
        for value in values_of(rule).values() if rule != "same" else ():
            value = literal(value, default(SDPOConfig, option))
            config = tiny.config(tmp_path, **{option: value, **beside.get(value, {})})
            assert getattr(config, option) == value


def test_every_key_of_self_distillation_is_on_the_page():
    text = (DOCS / "from_paper_code.md").read_text()
    missing = [name for name in SELF_DISTILLATION if not re.search(rf"`{name}[`=]", text)]
    assert not missing
