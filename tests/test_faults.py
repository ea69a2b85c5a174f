"""What a run does when something around it breaks: killed, full disk, dead or hanging rewards, broken gradients."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from sdpo_trl.checkpoints import damage, last_complete
from sdpo_trl.faults import CheckpointError, RewardError, guarded, writing

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
TESTS = Path(__file__).parent


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def saving(folder, reward=None, steps=4, **options):
    """A run with a checkpoint at every second step."""
    return tiny.trainer(
        folder, reward or tiny.telling(), max_steps=steps,
        **{
            "data": tiny.prompts(16), "trainer_peft_config": tiny.lora(), "save_strategy": "steps", "save_steps": 2,
            **options,
        },
    )  # fmt: skip


# Killed

FAULTS = {
    "step": ("checkpoint-4", None),
    "weights": ("checkpoint-2", "has no trainer_state.json"),
    "teacher": ("checkpoint-2", "has no trainer_state.json"),
    "state": ("checkpoint-2", "cut off: trainer_state.json"),
}


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """Where the runs of fault_worker.py left what happened to them."""
    root = tmp_path_factory.mktemp("died")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(TESTS / "fault_worker.py"), str(root), "none", *FAULTS, "hang", "sweep"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def report(root, fault):
    return json.loads((root / f"{fault}.json").read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(died, fault):
    last, reason = FAULTS[fault]
    result, output = report(died, fault), (died / f"{fault}-again.txt").read_text()
    assert result["code"] == -signal.SIGKILL
    assert result["killed"]["last"] == last and result["killed"]["passed"] == ["checkpoint-4"][: bool(reason)]
    assert result["again"] == 0 and result["intact"], output
    if reason is None:
        assert "passed over" not in output
    else:
        assert f"{died / fault / 'checkpoint-4'} is passed over, since it" in output and reason in output
        assert f"The run goes on from {died / fault / last}." in output
    expected, actual = (torch.load(died / name / "end.pt", weights_only=True) for name in ("none", fault))
    assert actual["step"] == expected["step"] == 8
    tiny.assert_equal(actual["tensors"], expected["tensors"])


def test_a_run_that_is_killed_again_and_again_never_loses_a_complete_checkpoint(died):
    kills = report(died, "sweep")
    assert len(kills) >= 4
    last = 0
    for before, after, _ in kills:
        assert before == last
        last = int(after.split("-")[1]) if after else 0
        assert last >= before
    for file in ("adapter_model.safetensors", "sdpo_teacher.safetensors"):
        expected, actual = (load_file(died / name / "checkpoint-8" / file) for name in ("none", "sweep"))
        tiny.assert_equal(actual, expected)


def test_a_process_with_an_abandoned_thread_ends(died):
    output = (died / "hang.txt").read_text()
    assert report(died, "hang")["code"] == 1 and "The reward function `hanging` did not answer" in output


# Which checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    saving(folder).train()
    return folder


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), "has no trainer_state.json"),
    "torn state": (lambda folder: cut(folder / "trainer_state.json"), "cut off: trainer_state.json"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no weights"),
    "torn weights": (lambda folder: cut(folder / "adapter_model.safetensors"), "cut off: adapter_model.safetensors"),
    "no teacher": (lambda folder: (folder / "sdpo_teacher.safetensors").unlink(), "lacks sdpo_teacher.safetensors"),
    "torn teacher": (lambda folder: cut(folder / "sdpo_teacher.safetensors"), "cut off: sdpo_teacher.safetensors"),
    "torn memory": (lambda folder: cut(folder / "sdpo_state.json"), "cut off: sdpo_state.json"),
    "torn optimizer": (lambda folder: cut(folder / "optimizer.pt"), "cut off: optimizer.pt"),
    "empty file": (lambda folder: os.truncate(folder / "scheduler.pt", 0), "cut off: scheduler.pt"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_incomplete_checkpoint_is_passed_over(tmp_path, finished, caplog, name):
    break_it, message = DAMAGES[name]
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    break_it(tmp_path / "checkpoint-4")
    kept = contents(tmp_path / "checkpoint-2")
    trainer = saving(tmp_path)
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        assert trainer._whole_checkpoint() == str(tmp_path / "checkpoint-2")
    assert f"{tmp_path / 'checkpoint-4'} is passed over, since it" in caplog.text and message in caplog.text
    assert contents(tmp_path / "checkpoint-2") == kept
    if name == "no teacher":  # whole, but another teacher's: the store says so
        return
    with pytest.raises(ValueError, match=r"checkpoint-4 is incomplete: it .*`resume_from_checkpoint=True`"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_whole_checkpoint_is_taken_without_a_word(tmp_path, finished, caplog):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    trainer = saving(tmp_path, steps=5)
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        assert trainer._whole_checkpoint() == str(tmp_path / "checkpoint-4")
        trainer.train(resume_from_checkpoint=True)
    assert "passed over" not in caplog.text and len(tiny.training_logs(trainer)) == 5


def test_without_a_complete_checkpoint_each_is_named_with_its_fault(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    DAMAGES["no state"][0](tmp_path / "checkpoint-2")
    DAMAGES["torn teacher"][0](tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match=r"No checkpoint in .* is complete") as caught:
        saving(tmp_path).train(resume_from_checkpoint=True)
    assert "checkpoint-2 has no trainer_state.json" in str(caught.value)
    assert "checkpoint-4 holds a file that was cut off: sdpo_teacher.safetensors" in str(caught.value)
    with pytest.raises(ValueError, match="No valid checkpoint found"):  # transformers' own words
        saving(tmp_path / "new").train(resume_from_checkpoint=True)


def test_sharded_weights_with_a_shard_missing_are_incomplete(tmp_path):
    folder = tmp_path / "checkpoint-1"
    tiny.build_model().save_pretrained(folder, max_shard_size="40KB")
    (folder / "trainer_state.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 1 and damage(folder) is None
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.unlink()
    assert damage(folder) == f"lacks {shard.name}"


def test_a_checkpoint_that_is_written_over_is_incomplete_until_its_end(tmp_path, finished, monkeypatch):
    """Else a kill in between would leave a folder that mixes two runs and looks whole."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    trainer = saving(tmp_path)
    seen = []
    plain = trainer._save_optimizer_and_scheduler
    monkeypatch.setattr(
        trainer, "_save_optimizer_and_scheduler", lambda folder: (seen.append(damage(Path(folder))), plain(folder))
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == ["has no trainer_state.json, which is written last"] and damage(tmp_path / "checkpoint-4") is None


def test_a_limit_on_checkpoints_keeps_the_whole_one_not_a_broken_one_of_a_later_step(tmp_path, finished, caplog):
    """By number, as transformers rotates where times of files mean nothing."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    trainer = saving(tmp_path, steps=3, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert damage(tmp_path / "checkpoint-3") is None
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "_incomplete-checkpoint-4",
        "checkpoint-3",
    ]
    assert "_incomplete-checkpoint-4 is an incomplete checkpoint of a run that was killed" in caplog.text


# Disks and folders


@pytest.fixture
def small_disk(tmp_path):
    """A disk of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.name == "posix" and shutil.which("mount") and os.geteuid() == 0
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("a small disk cannot be mounted here: this needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class FillTheDisk(TrainerCallback):
    """Before step 4 is saved, leaves room for this share of a checkpoint."""

    def __init__(self, disk, share):
        self.disk, self.share = disk, share

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and not (self.disk / "filler").exists():
            size = sum(path.stat().st_size for path in Path(args.output_dir, "checkpoint-2").iterdir())
            room = shutil.disk_usage(self.disk).free - int(self.share * size)
            (self.disk / "filler").write_bytes(bytes(room))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("peft", [False, True])
def test_a_full_disk(small_disk, share, peft):
    """Whichever file is the one for which there is no room."""
    options = {} if peft else {"trainer_peft_config": None}
    folder = small_disk / "run"
    trainer = saving(folder, trainer_callbacks=[FillTheDisk(small_disk, share)], **options)
    kept = {}
    plain = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *args: (plain(*args), kept.setdefault(2, contents(folder / "checkpoint-2")))
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    message = str(caught.value)
    assert f"{folder / 'checkpoint-4'} could not be written" in message
    assert "MB are free on the disk" in message and "save_total_limit" in message and "`output_dir`" in message
    assert f"last complete checkpoint is {folder / 'checkpoint-2'}" in message
    assert contents(folder / "checkpoint-2") == kept[2] and last_complete(str(folder))[0].name == "checkpoint-2"
    (small_disk / "filler").unlink()
    again = saving(folder, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4 and damage(folder / "checkpoint-4") is None


def test_a_full_disk_under_the_table_of_rollouts(small_disk):
    folder = small_disk / "run"
    options = {"log_completions": True, "num_completions_to_print": 0}
    trainer = saving(folder, trainer_callbacks=[FillTheDisk(small_disk, 0.0)], **options)
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    assert f"{folder / 'completions'} could not be written" in str(caught.value)
    assert "MB are free on the disk" in str(caught.value)
    assert f"last complete checkpoint is {folder / 'checkpoint-2'}" in str(caught.value)


def test_a_full_disk_under_the_final_model(small_disk):
    trainer = saving(small_disk / "run", save_strategy="no")
    trainer.train()
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    with pytest.raises(CheckpointError, match=r"export could not be written .*MB are free"):
        trainer.save_model(str(small_disk / "export"))
    (small_disk / "filler").unlink()
    trainer.save_model(str(small_disk / "export"))  # nothing is lost


def test_a_file_in_the_place_of_the_output_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"run could not be written .*another `output_dir`.*Nothing has been"):
        saving(tmp_path / "run")


def test_an_output_folder_that_is_read_only(tmp_path):
    (tmp_path / "run").mkdir()
    bind = ["mount", "--bind", "-o", "ro", str(tmp_path / "run"), str(tmp_path / "run")]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(bind).returncode:
        pytest.skip("a folder cannot be mounted read-only here: this needs root and the right to mount")
    try:
        with pytest.raises(CheckpointError, match=r"could not be written \(.*[Rr]ead-only.*may write to"):
            saving(tmp_path / "run")
    finally:
        subprocess.run(["umount", tmp_path / "run"], check=True)


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path):
    trainer = saving(tmp_path)
    (tmp_path / "checkpoint-4").write_text("in the way")
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    assert f"{tmp_path / 'checkpoint-4'} could not be written" in str(caught.value)
    assert f"last complete checkpoint is {tmp_path / 'checkpoint-2'}" in str(caught.value)


def test_what_is_no_fault_of_the_disk_passes_unchanged(tmp_path):
    other = FileNotFoundError(2, "No such file", "/somewhere/a-callbacks-own")
    for error in (RuntimeError("CUDA error"), ConnectionResetError(104, "reset"), ValueError("a"), other):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "x", str):
            raise error
        assert caught.value is error


# Rewards


def broken_at(step, what):
    """A reward function that does `what` at one step."""

    def reward(prompts, completions, trainer_state, **kwargs):
        return what() if trainer_state.global_step == step else [float(i % 2) for i in range(len(prompts))]

    return reward


def fail():
    raise KeyError("grader")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_dead_reward_function_is_named_with_its_prompts(tmp_path, chat, weight):
    trainer = saving(
        tmp_path, broken_at(3, fail), data=tiny.prompts(2, chat=chat), distillation_weight=weight,
        trainer_peft_config=None,
    )  # fmt: skip
    with pytest.raises(RewardError) as caught:
        trainer.train()
    message = str(caught.value)
    assert "The reward function `reward` failed with KeyError: 'grader'. It had 8 answers to judge" in message
    assert "- task 0: =\n" in message and "- task 1: x=\n" in message and message.count("- task") == 2
    assert f"last complete checkpoint is {tmp_path / 'checkpoint-2'}" in message
    assert isinstance(caught.value.__cause__, KeyError) and damage(tmp_path / "checkpoint-2") is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "gave `None` instead of a list"),
        (1.0, r"gave a float \(1.0\) instead of a list"),
        ("1", r"gave a str \('1'\) instead of a list"),
        (["1"] * 8, r"gave a list with a str \('1'\) in it"),
        ([[1.0]] * 8, r"gave a list with a list \(\[1.0\]\) in it"),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_no_list_of_rewards_is_named(tmp_path, kind, result, message):
    async def later(prompts, **kwargs):
        return result

    reward = later if kind == "async" else lambda prompts, **kwargs: result
    with pytest.raises(RewardError, match=f"(?s)The reward function `.*` {message}.*8 answers to judge.*- task \\d"):
        tiny.trainer(tmp_path, reward).train()


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, iter])
def test_rewards_may_be_any_sequence_of_numbers(tmp_path, kind):
    trainer = tiny.trainer(tmp_path, lambda prompts, **kwargs: kind([float(i % 2) for i in range(len(prompts))]))
    trainer.train()
    assert tiny.training_logs(trainer)[0]["reward"] == 0.5


def test_a_set_smaller_than_a_rollout_batch_is_refused(tmp_path):
    """TRL would end the run before its first step, as if all were well."""
    with pytest.raises(
        ValueError, match="The training set has 1 rows, and one rollout batch needs 2 different prompts"
    ):
        tiny.trainer(tmp_path, data=tiny.prompts(1)).train()
    tiny.trainer(tmp_path, data=tiny.prompts(1), num_generations=8, max_steps=1).train()


def test_without_a_checkpoint_the_error_says_so(tmp_path):
    with pytest.raises(RewardError, match="There is no checkpoint in"):
        tiny.trainer(tmp_path, broken_at(0, fail)).train()


def test_a_dead_feedback_function_is_named_with_its_prompts(tmp_path):
    def feedback(prompts, completions, rewards, **columns):
        raise OSError("the judge is away")

    with pytest.raises(RewardError, match=r"(?s)`feedback_func` failed with OSError: the judge is away.*- task 2"):
        tiny.trainer(tmp_path, trainer_feedback_func=feedback).train()


def sleeping():
    time.sleep(60)


async def async_reward(prompts, completions, trainer_state, **kwargs):
    if trainer_state.global_step == 3:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            async_reward.cancelled.set()
            raise
    return [0.0] * len(prompts)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_reward_function_ends_the_run(tmp_path, kind):
    async_reward.cancelled = threading.Event()
    reward = broken_at(3, sleeping) if kind == "sync" else async_reward
    trainer = saving(tmp_path, reward, reward_timeout=0.5, data=tiny.prompts(2))
    begin = time.monotonic()
    with pytest.raises(RewardError) as caught:
        trainer.train()
    assert time.monotonic() - begin < 20
    name = "reward" if kind == "sync" else "async_reward"
    message = str(caught.value)
    assert f"The reward function `{name}` did not answer within `reward_timeout=0.5` seconds" in message
    assert "- task 1: x=" in message and f"last complete checkpoint is {tmp_path / 'checkpoint-2'}" in message
    assert ("its thread was abandoned" in message) == (kind == "sync")
    assert kind == "sync" or async_reward.cancelled.wait(5)


@pytest.mark.parametrize("kind", ["sync", "async", "coroutine"])
def test_a_hanging_feedback_function_ends_the_run(tmp_path, kind):
    def sync(prompts, completions, rewards, **columns):
        sleeping()

    async def asynchronous(prompts, completions, rewards, **columns):
        await asyncio.sleep(60)

    function = {"sync": sync, "async": asynchronous, "coroutine": lambda *args, **columns: asynchronous(*args)}[kind]
    with pytest.raises(RewardError, match=r"`feedback_func` did not answer within `reward_timeout=0.5`"):
        tiny.trainer(tmp_path, trainer_feedback_func=function, reward_timeout=0.5).train()


def test_a_time_limit_that_is_kept_changes_nothing(tmp_path):
    def run(seconds):
        torch.manual_seed(0)
        trainer = tiny.trainer(tmp_path, tiny.telling(reward=tiny.even_length), reward_timeout=seconds)
        trainer.train()
        return trainer

    limited, free = run(60.0), run(None)
    tiny.assert_equal(tiny.trained(limited.model), tiny.trained(free.model))


def test_a_guarded_function_sees_the_callers_gradient_mode_and_its_own_timeout_is_its_own():
    seen = guarded(lambda prompts: torch.is_grad_enabled(), "it", 5.0, str)
    with torch.no_grad():
        assert seen(["a"]) is False
    assert seen(prompts=["a"]) is True

    def slow_server(prompts):
        raise TimeoutError("the server")

    with pytest.raises(RewardError, match="it failed with TimeoutError: the server"):
        guarded(slow_server, "it", 5.0, str)(["a"])


def test_a_function_that_limits_itself_is_called_in_the_main_thread(tmp_path):
    """As `MathReward`, whose alarm works there alone."""
    pytest.importorskip("math_verify")
    from sdpo_trl.environments import MathReward

    answers = [r"\boxed{2}$", r"\boxed{3}$"]
    trainer = tiny.trainer(
        tmp_path, [MathReward(), tiny.never], data=tiny.prompts(2, answer=["2", "2"]), reward_timeout=60.0,
        max_steps=1, trainer_rollout_func=tiny.scripted(answers), max_completion_length=20,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["rewards/math_reward/mean"] == 0.5


# Rewards that are none


def test_an_answer_without_a_reward_is_no_success_and_trains_nothing(tmp_path):
    """Rows 0 and 4 have no reward; the one of row 1 is the only success of its group."""
    given = [float("nan"), 1.0, 0.0, 0.0, None, 0.0, 0.0, 0.0]

    def reward(completions, log_extra, **kwargs):
        log_extra("feedback", [None] * len(completions))
        return given

    trainer = tiny.trainer(tmp_path, reward, data=tiny.prompts(2), distillation_weight=0.5)
    seen = []
    plain = trainer._route
    trainer._route = lambda output, success: (seen.append((success, output["advantages"])), plain(output, success))[1]
    (inputs,) = tiny.micro_batches(trainer)
    success, advantages = seen[0]
    assert success.tolist() == [False, True] + [False] * 6
    assert advantages[[0, 4, 5, 6, 7]].eq(0).all() and advantages[1] > 0 > advantages[2]
    loss, gradients = tiny.gradient(trainer, inputs)
    assert torch.isfinite(torch.tensor(loss)) and all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_no_rewards_at_all_are_said_once_and_train_nothing(tmp_path, caplog, weight):
    def reward(completions, **kwargs):
        return [None] * len(completions)

    trainer = tiny.trainer(tmp_path, reward, max_steps=3, distillation_weight=weight)
    before = tiny.trained(trainer.model)
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        trainer.train()
    assert caplog.text.count("no reward function gave a reward for any of the 8 answers") == 1
    assert "at step 0" in caplog.text and "(reward) return NaN or None" in caplog.text and "- task" in caplog.text
    tiny.assert_equal(tiny.trained(trainer.model), before)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in tiny.training_logs(trainer))


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_an_infinite_reward_is_refused(tmp_path, value):
    def reward(completions, **kwargs):
        return [0.0] * 5 + [value] + [0.0] * 2

    with pytest.raises(RewardError, match=r"(?s)`reward` gave -?inf for an answer.*- task 1.*must be finite"):
        tiny.trainer(tmp_path, reward, data=tiny.prompts(2), trainer_rollout_func=tiny.scripted(["a$"])).train()


# Gradients


class BreakGradients(TrainerCallback):
    """The gradient of these steps, counted from 1, is not finite."""

    def __init__(self, steps, value):
        self.steps, self.value, self.weights = steps, value, []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(tiny.trained(model))
        if state.global_step + 1 in self.steps:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            self.hook = parameter.register_hook(lambda gradient: gradient * self.value)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.hook.remove()


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_whose_gradient_is_not_finite_is_skipped_with_a_warning(tmp_path, caplog, value, max_grad_norm):
    watch = BreakGradients({2, 4}, value)
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), max_steps=5, trainer_callbacks=[watch], max_grad_norm=max_grad_norm,
        weight_decay=0.1, gradient_accumulation_steps=2, per_device_train_batch_size=4, data=tiny.prompts(16),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        trainer.train()
    for step in (2, 4):
        assert f"the gradient of step {step} is not finite" in caplog.text
    assert caplog.text.count("so the step is skipped") == 2 and "(1 in a row; the run ends at 3)" in caplog.text
    weights = [*watch.weights, tiny.trained(trainer.model)]
    for step in range(1, 6):
        before, after = weights[step - 1], weights[step]
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved == (step not in (2, 4)), step
        assert all(value.isfinite().all() for value in after.values())
    assert trainer.state.global_step == 5


def test_several_such_steps_in_a_row_end_the_run(tmp_path):
    watch = BreakGradients({1, 3, 4}, float("nan"))
    trainer = saving(tmp_path, steps=6, trainer_callbacks=[watch], max_nonfinite_steps=2)
    with pytest.raises(FloatingPointError) as caught:
        trainer.train()
    message = str(caught.value)
    assert "at 2 steps in a row, up to step 4; none of them was applied (`max_nonfinite_steps=2`)" in message
    assert f"last complete checkpoint is {tmp_path / 'checkpoint-2'}" in message
    tiny.assert_equal(tiny.trained(trainer.model), watch.weights[2])


def test_a_step_that_deepspeed_has_applied_ends_the_run_at_once(tmp_path):
    """It steps within the backward pass, and gives -1 as the norm of a gradient that holds NaN."""
    trainer = tiny.trainer(tmp_path, tiny.telling())

    class Engine:
        applied = True

        def was_step_applied(self):
            return self.applied

    trainer.is_deepspeed_enabled, trainer.model_wrapped = True, Engine()
    trainer.accelerator.clip_grad_norm_ = lambda *args: -1.0
    with pytest.raises(FloatingPointError, match=r"step 1 is not finite .*DeepSpeed has applied it"):
        trainer._get_grad_norm(trainer.model)
    Engine.applied = False  # it was skipped, and is counted
    assert trainer._get_grad_norm(trainer.model) == -1.0
    assert trainer._get_grad_norm(trainer.model) == -1.0
    with pytest.raises(FloatingPointError, match="at 3 steps in a row"):
        trainer._get_grad_norm(trainer.model)
