"""examples/train_code.py: its configurations, its problems, and whole runs on untaught models.

pytest -m slow tests/test_train_code.py     # the offline run of examples/configs/code_cpu.yaml: success rises
pytest -m real tests/test_train_code.py     # SmolLM2 on the shipped problems
"""

import json
import os
import random
import shutil
import warnings
from pathlib import Path

import letters
import pytest
import small_programs
import tiny
import torch
import yaml
from conftest import ROOT
from train_code import CodeArguments, main, problems, sets
from transformers import AutoModelForCausalLM
from trl import ModelConfig, TrlParser

from sdpo_trl import SDPOConfig
from sdpo_trl.environments import CodeReward, Limits, Sandbox
from sdpo_trl.environments.code_tests import read_tests

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
CONFIGS = ROOT / "examples" / "configs"
CPU = ["--use_cpu", "True", "--bf16", "False", "--report_to", "none", "--disable_tqdm", "True"]
SMALL = {
    "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4, "signal_rows": 0, "eval_steps": 2,
    "save_steps": 2, "logging_steps": 1, "per_device_eval_batch_size": 12, "num_generations_eval": 2,
    "save_total_limit": 1,
}  # fmt: skip
QUICK = [f"--{name}={value}" for name, value in SMALL.items()]


def parse(name, folder, *more):
    parser = TrlParser((CodeArguments, SDPOConfig, ModelConfig))
    return parser.parse_args_and_config(["--config", str(CONFIGS / name), *CPU, "--output_dir", str(folder), *more])


@pytest.fixture
def untaught(monkeypatch):
    """The model built in code without its warm start, which takes a minute."""

    def build(rows, seed):
        tokenizer = small_programs.build_tokenizer()
        return letters.build_model(tokenizer, seed, hidden_size=32, positions=256), tokenizer

    monkeypatch.setattr(small_programs, "warm_started", build)


# Configurations


def test_there_is_a_configuration_for_each_use():
    assert {path.name for path in CONFIGS.glob("*.yaml")} == {
        "code_cpu.yaml", "code_no_feedback.yaml", "code_rich_feedback.yaml", "code_small_gpu.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("code_*.yaml")), ids=lambda path: path.stem)
def test_every_key_is_an_option_and_keeps_its_value(path, tmp_path):
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    parsed = parse(path.name, tmp_path)  # an unknown key, or an option without effect, is an error
    for name, value in given.items():
        if name not in ("use_cpu", "bf16", "report_to", "output_dir"):
            holder = next(part for part in parsed if hasattr(part, name))
            kept = getattr(holder, name)
            assert kept == value or (kept == [value] and name == "lora_target_modules"), name
    args = parsed[1]
    assert args.eval_strategy == args.save_strategy == "steps" and args.save_steps % args.eval_steps == 0
    assert args.load_best_model_at_end and args.metric_for_best_model == "sdpo/success_share"
    assert args.per_device_eval_batch_size % args.num_generations_eval == 0


def test_a_key_that_is_no_option_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("dataset_name: own\nteacher_rate: 0.1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="teacher_rate"):
        main(["--config", str(tmp_path / "a.yaml"), "--output_dir", str(tmp_path), *CPU])


COMMON = {
    "num_generations": 8, "max_completion_length": 8192, "max_reprompt_len": 10240, "temperature": 1.0,
    "weight_decay": 0.01, "max_grad_norm": 1.0, "distillation_is_clip": 2.0, "distillation_add_tail": True,
    "teacher_model_kind": "ema", "teacher_sync_steps": None, "dont_reprompt_on_self_success": False,
    "chat_template_kwargs": {"enable_thinking": False}, "distillation_weight": 1.0,
    "distillation_mode": "topk_logits", "num_iterations": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "paper"),
    [
        (
            "code_no_feedback.yaml",
            {
                "distillation_alpha": 0.5, "distillation_topk": 100, "teacher_update_rate": 0.05,
                "learning_rate": 1e-5, "include_environment_feedback": False, "use_successful_as_teacher": True,
            },
        ),
        (
            "code_rich_feedback.yaml",
            {
                "distillation_alpha": 1.0, "distillation_topk": 20, "teacher_update_rate": 0.01,
                "learning_rate": 1e-6, "include_environment_feedback": True,
                "environment_feedback_only_without_solution": False, "use_successful_as_teacher": True,
            },
        ),
    ],
)  # fmt: skip
def test_the_papers_settings(name, paper, tmp_path):
    """Sections 3 and 4 of arXiv 2601.20802; 32 prompts x 8 answers a step, on-policy."""
    _, args, model = parse(name, tmp_path)
    for option, value in {**COMMON, **paper}.items():
        assert getattr(args, option) == value, option
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 32 * 8  # on 8 GPUs
    assert args.steps_per_generation == args.gradient_accumulation_steps  # one optimizer step per rollout batch
    assert model.model_name_or_path == "Qwen/Qwen3-8B" and not model.use_peft


def test_the_small_gpu_has_an_adapter_and_a_blend(tmp_path):
    _, args, model = parse("code_small_gpu.yaml", tmp_path)
    assert model.use_peft and args.distillation_weight == 0.1


# Problems


def test_problems_to_train_on_and_held_out_ones_are_apart(tmp_path):
    for name, counts in (("own", (48, 12)), ("names", (24, 12))):
        trained, held_out = (problems(CodeArguments(name), 0, part) for part in (False, True))
        assert (len(trained), len(held_out)) == counts
        assert not set(trained["id"]) & set(held_out["id"])
    lines = Path(ROOT / "sdpo_trl/environments/problems.jsonl").read_text(encoding="utf-8").splitlines()[:5]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = CodeArguments(
        str(tmp_path / "rows.jsonl"), dataset_train_split="train[:3]", dataset_test_split="train[3:]",
        max_hidden_tests=1,
    )  # fmt: skip
    trained, held_out = (problems(data, 0, part) for part in (False, True))
    assert (len(trained), len(held_out)) == (3, 2) and not set(trained["id"]) & set(held_out["id"])
    assert all(len(read_tests(tests)) == 1 for tests in trained["hidden_tests"])


def test_the_tokenizer_gives_every_prompt_and_answer_back():
    tokenizer = small_programs.build_tokenizer()
    for rows in (small_programs.name_rows, small_programs.table_rows):
        for prompt, answer in rows(0, 40, random.Random(1)):
            assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
            ids = tokenizer(answer).input_ids
            assert tokenizer.decode(ids) == answer and len(ids) < small_programs.MAX_COMPLETION_LENGTH
            assert tokenizer.unk_token_id not in tokenizer(prompt).input_ids


@needs_bwrap
def test_the_warm_start_reads_what_the_grader_says():
    """The text that was taught is, character by character, the one that a failed program gets."""
    reward = CodeReward(Sandbox(Limits(cpu_seconds=1, wall_seconds=5, memory_bytes=256 << 20)), workers=2)
    task = letters.Task("QC", letters.Program("+", 3))
    wrong = letters.Program("*", 3)
    name, table = small_programs.name_row(task), small_programs.table_row(7, [3, 1, 4])
    answers = [small_programs.fenced(text) for text in (wrong, task.program, "13", "[3,1,9][x]", "[3,1,4][x]")]
    rows = [name, name, name, table, table]
    said = {}
    rewards = reward(
        [row["prompt"] for row in rows], answers, [row["public_tests"] for row in rows],
        [row["hidden_tests"] for row in rows], ["f"] * 5, log_extra=said.__setitem__,
    )  # fmt: skip
    assert rewards == [0.0, 1.0, 0.0, 0.0, 1.0]
    feedback = said["feedback"]
    assert feedback[0] == small_programs.failure(0, read_tests(name["public_tests"]), 30)
    assert letters.render("QC:", None, feedback[0]) == small_programs.hinted_name(
        "QC", task.program, wrong, "feedback"
    )
    assert "hidden test" in feedback[2]  # the value at one input is no program
    assert feedback[3] == small_programs.failure(2, read_tests(table["public_tests"]), 9)
    assert feedback[1] is feedback[4] is None
    assert len({program(small_programs.PUBLIC_INPUT) for program in letters.PROGRAMS}) == 36


# Runs


@needs_bwrap
def test_a_run_evaluates_keeps_the_best_and_is_taken_up_again(untaught, tmp_path):
    config = ["--config", str(CONFIGS / "code_cpu.yaml"), *CPU, *QUICK, "--output_dir", str(tmp_path)]
    (tmp_path / "checkpoint-1").mkdir()  # of a run that was killed while it wrote its first one
    trainer = main([*config, "--resume", "true", "--max_steps", "2"])  # there is nothing to resume from yet
    assert trainer.state.global_step == 2
    points = json.loads((tmp_path / "evaluations.json").read_text())
    assert [point["step"] for point in points] == [0, 2]
    assert all(point["pass@1"] == point["pass@2"] == 0.0 for point in points)  # random characters
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")

    trainer = main([*config, "--resume", "true"])
    assert trainer.state.global_step == 4
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logs] == [1, 2, 3, 4]
    assert all(row["sdpo/feedback_share"] == 1.0 for row in logs)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1  # the best one
    assert [point["step"] for point in json.loads((tmp_path / "evaluations.json").read_text())] == [0, 2, 4]
    tokenizer = small_programs.build_tokenizer()
    ids = tokenizer("QC:", return_tensors="pt").input_ids
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        torch.testing.assert_close(saved, trainer.model.eval()(ids).logits)

    trainer = main([*config, "--resume", "true"])  # a queue starts the finished run once more
    assert trainer.state.global_step == 4
    with torch.no_grad():
        torch.testing.assert_close(trainer.model.eval()(ids).logits, saved)


@needs_bwrap
def test_held_out_problems_are_there_where_only_the_start_is_evaluated(untaught, tmp_path):
    config = ["--config", str(CONFIGS / "code_cpu.yaml"), *CPU, *QUICK, "--eval_strategy", "no", "--save_strategy",
              "no", "--load_best_model_at_end", "false", "--max_steps", "1"]  # fmt: skip
    main([*config, "--output_dir", str(tmp_path)])
    assert [point["step"] for point in json.loads((tmp_path / "evaluations.json").read_text())] == [0]


def test_held_out_problems_that_are_trained_on_are_spoken_of(tmp_path):
    lines = Path(ROOT / "sdpo_trl/environments/problems.jsonl").read_text(encoding="utf-8").splitlines()[:5]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    args = SDPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, eval_strategy="steps", eval_steps=1)
    with pytest.warns(UserWarning, match="2 of the 2 held-out problems"):
        sets(CodeArguments(str(tmp_path / "rows.jsonl"), dataset_test_split="train[3:]"), args)
    apart = CodeArguments(
        str(tmp_path / "rows.jsonl"), dataset_train_split="train[:3]", dataset_test_split="train[3:]"
    )
    with warnings.catch_warnings(action="error"):
        found = sets(apart, args)
    assert (len(found["train_dataset"]), len(found["eval_dataset"])) == (3, 2)


@needs_bwrap
def test_pure_blended_and_grpo(untaught, tmp_path):
    config = ["--config", str(CONFIGS / "code_cpu.yaml"), *CPU, *QUICK, "--eval_strategy", "no", "--save_strategy",
              "no", "--load_best_model_at_end", "false", "--eval_on_start", "false", "--max_steps", "1"]  # fmt: skip
    trainer = main([*config, "--output_dir", str(tmp_path / "blend"), "--distillation_weight", "0.5"])
    assert trainer.state.log_history[0]["sdpo/distilled_share"] == 1.0
    templates = [f"--{name}={getattr(SDPOConfig, name)}" for name in small_programs.TEMPLATES]
    grpo = [*config, *templates, "--distillation_weight", "0", "--output_dir", str(tmp_path / "grpo")]
    trainer = main([*grpo, "--skip_solved", "false", "--rest_steps", "null"])
    names = {name for name in trainer.state.log_history[0] if name.startswith("sdpo/")}
    assert all(name.startswith("sdpo/time/") for name in names)
    with pytest.raises(ValueError, match="solved problems"):
        main(grpo)


@needs_bwrap
def test_a_chat_model_with_an_adapter_is_told_by_another_model(tmp_path, capsys):
    from test_llm_feedback import fine, server

    base = tmp_path / "base"
    tiny.build_model(max_position_embeddings=4096).save_pretrained(base)
    tiny.build_tokenizer().save_pretrained(base)
    with server(fine) as (url, asked, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "none")
        trainer = main(
            f"--model_name_or_path {base} --dataset_name own --output_dir {tmp_path / 'out'} --use_peft --lora_r 4 "
            "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 6 --max_steps 1 "
            f"--logging_steps 1 --save_strategy no --feedback_model m --feedback_base_url {url}".split()
            + CPU
        )
    assert len(asked) == 4 and "The check reported" in asked[0]["messages"][1]["content"]
    assert trainer.state.log_history[0]["sdpo/feedback_share"] == 1.0
    assert "calls=4, explained=4, fell_back=0" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@needs_bwrap
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--dataset_name own", "--model_name_or_path"),
        ("--dataset_name names --model_name_or_path x", "drop `model_name_or_path`"),
        ("--dataset_name names --signal_rows 999", "more than the 8 rollouts"),
        ("--dataset_name names --score half", "'pass' or 'share'"),
        ("--dataset_name names --feedback_base_url http://a/v1", "name the model"),
        ("--dataset_name names --feedback_model m --feedback_base_url http://a/v1", "OPENAI_API_KEY"),
        ("--dataset_name names --resume true --resume_from_checkpoint a", "last complete checkpoint"),
        ("--dataset_name own --dataset_train_split train[:3]", "`dataset_train_split` has no effect"),
        ("--dataset_name names --max_hidden_tests 3", "`max_hidden_tests` has no effect"),
        ("--dataset_name names --rest_steps 3", "`rest_steps=3` has no effect"),
    ],
)
def test_what_cannot_work_says_what_to_do(untaught, tmp_path, monkeypatch, line, says):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=says):
        main([*line.split(), *CPU, "--output_dir", str(tmp_path)])


@needs_bwrap
@pytest.mark.slow
def test_the_offline_run_solves_held_out_problems(tmp_path):
    """Minutes: the whole of examples/configs/code_cpu.yaml, warm start included."""
    main(["--config", str(CONFIGS / "code_cpu.yaml"), *CPU, "--output_dir", str(tmp_path)])
    points = json.loads((tmp_path / "evaluations.json").read_text())
    best = max(point["pass@1"] for point in points)
    assert points[0]["pass@1"] < 0.15 and best > 0.4, points
    assert all(point["self-teacher"] > 0.4 for point in points), points


@needs_bwrap
@pytest.mark.real
def test_a_real_model_runs_on_the_shipped_problems(tmp_path):
    """Two steps of SmolLM2-135M-Instruct with an adapter; `$SDPO_SMOLLM2` names its folder, as in test_real.py."""
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    from get_smollm2 import get_smollm2

    folder = get_smollm2(Path(os.environ.get("SDPO_SMOLLM2", tmp_path / "smollm2")))
    trainer = main(
        f"--model_name_or_path {folder} --dataset_name own --output_dir {tmp_path / 'out'} --use_peft "
        "--lora_dropout 0 --lora_target_modules all-linear --per_device_train_batch_size 4 --num_generations 4 "
        "--max_steps 2 --max_completion_length 96 --learning_rate 1e-4 --logging_steps 1 --save_strategy no "
        "--skip_solved true --gradient_checkpointing False".split()
        + CPU
    )
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 2
    for row in logs:
        print({name: round(value, 4) for name, value in row.items() if name.startswith(("sdpo/", "code/"))})
        assert row["sdpo/distilled_share"] > 0 and row["sdpo/divergence"] > 0
