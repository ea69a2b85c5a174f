"""What a run tells about itself: where the time goes, bars on a terminal, and the log of its own."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from sdpo_trl import progress, timing
from sdpo_trl.loss_trainer import LossTrainer
from sdpo_trl.run_log import RUN_LOG, RunLog, changed_settings
from sdpo_trl.timing import PARTS, StepClock

HOST = torch.device("cpu")


def times(row: dict) -> dict[str, float]:
    return {name.removeprefix("sdpo/time/"): value for name, value in row.items() if name.startswith("sdpo/time/")}


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / RUN_LOG).read_text().splitlines()]


# The clock


class Hours:
    """A clock that tests turn: `timing.HostMark` reads it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def pass_(self, hours):
        self.now += hours


def test_parts_within_parts_add_up(monkeypatch):
    hours = Hours(monkeypatch)
    clock = StepClock(HOST)
    for step in range(2):
        clock.start()
        hours.now += 1
        with clock.part("student"):
            hours.now += 2
            with clock.part("teacher"):
                hours.now += 4
            hours.now += 8
        clock.change("optimizer")
        hours.now += 16 * (step + 1)
        clock.stop()
        hours.now += 100
        with clock.part("generation"):  # of an evaluation
            hours.now += 1000
    means = clock.flush()
    assert means == {
        **dict.fromkeys((*PARTS, "outside"), 0.0),
        "other": 1, "student": 10, "teacher": 4, "optimizer": 24, "step": 39, "outside": 550,
    }  # fmt: skip
    assert clock.flush() == {}


def test_a_part_that_raises_ends(monkeypatch):
    hours = Hours(monkeypatch)
    clock = StepClock(HOST)
    clock.start()
    with pytest.raises(KeyError), clock.part("student"), clock.part("teacher"):
        hours.now += 3
        raise KeyError
    hours.now += 5
    clock.stop()
    assert {name: value for name, value in clock.flush().items() if value} == {"teacher": 3, "other": 5, "step": 8}


def test_a_new_run_forgets_the_one_that_broke_off(monkeypatch):
    hours = Hours(monkeypatch)
    clock = StepClock(HOST)
    clock.start()
    hours.now += 7
    clock.forget()
    clock.stop()
    assert clock.flush() == {}
    hours.now += 1
    clock.start()
    hours.now += 2
    clock.stop()
    assert clock.flush() == {**dict.fromkeys((*PARTS, "outside"), 0.0), "other": 2, "step": 2}


class Queue:
    """An accelerator that does one thing after the other, while the host only hands them over."""

    def __init__(self, monkeypatch):
        self.host = self.free = 0.0
        self.waits = 0
        queue = self

        class Event:
            def __init__(self, device, enable_timing):
                assert device.type == "cuda" and enable_timing

            def record(self):
                self.at = max(queue.host, queue.free)

            def query(self):
                return queue.host >= self.at

            def synchronize(self):
                queue.waits += queue.host < self.at
                queue.host = max(queue.host, self.at)

            def elapsed_time(self, later):
                assert self.query() and later.query()
                return 1000 * (later.at - self.at)

        monkeypatch.setattr(torch, "Event", Event)

    def give(self, seconds):
        self.host += 0.001
        self.free = max(self.host, self.free) + seconds


def test_an_accelerators_time_belongs_to_the_part_that_gave_it_the_work(monkeypatch):
    queue = Queue(monkeypatch)
    clock = StepClock(torch.device("cuda"))
    for _ in range(3):
        clock.start()
        with clock.part("student"):
            queue.give(2.0)
        with clock.part("backward"):
            queue.give(4.0)
        with clock.part("reward"):
            queue.host = max(queue.host, queue.free) + 1.0  # reads the answers, then grades on the host
        with clock.part("optimizer"):
            queue.give(0.5)
        clock.stop()
    assert queue.waits == 0 and len(clock._waiting) == 1  # only the last step may still be running
    means = clock.flush()
    assert queue.waits == 1
    expected = {"student": 2.0, "backward": 4.0, "reward": 1.0, "optimizer": 0.5}
    assert {name: means[name] for name in expected} == pytest.approx(expected, abs=0.01)
    assert means["step"] == pytest.approx(7.5, abs=0.01) and means["other"] == pytest.approx(0, abs=0.01)


# The trainer's parts


def slow(function, seconds, pause=time.sleep):
    def later(*args, **kwargs):
        pause(seconds)
        return function(*args, **kwargs)

    return later


class Backward(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx, x, pause):
        ctx.pause = pause
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.pause()
        return gradient, None


@pytest.mark.parametrize(
    ("options", "micro", "batches"),
    [
        ({}, 1, 1),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 2, "per_device_train_batch_size": 4}, 2, 1),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4}, 2, 0.5),
        ({"teacher_model_kind": "live", "steps_per_generation": 2}, 1, 0.5),  # scored in the loss
        ({"distillation_weight": 0.0}, 1, 1),
    ],
    ids=["batch", "accumulated", "reused", "in the loss", "grpo"],
)
def test_each_part_has_its_own_time(tmp_path, monkeypatch, options, micro, batches):
    """Hours that pass in one place each, and nowhere else."""
    hours = Hours(monkeypatch)
    passing = partial(slow, pause=hours.pass_)
    trainer = tiny.trainer(tmp_path, passing(tiny.telling(), 2), max_steps=4, logging_steps=2, **options)
    trainer._generate_single_turn = passing(trainer._generate_single_turn, 1)
    trainer.create_optimizer()
    trainer.optimizer.step = passing(trainer.optimizer.step, 64)
    inner = LossTrainer._compute_loss

    def loss(self, model, inputs):
        hours.pass_(16)
        return Backward.apply(inner(self, model, inputs), lambda: hours.pass_(32))

    monkeypatch.setattr(LossTrainer, "_compute_loss", loss)
    grpo, alive = "distillation_weight" in options, "teacher_model_kind" in options
    if not grpo:
        building, scoring = trainer._prompt_builder, trainer._teacher_pass
        monkeypatch.setattr(building, "build", passing(building.build, 4))
        name = "head" if alive else "cached"
        monkeypatch.setattr(scoring, name, passing(getattr(scoring, name), 8))
        monkeypatch.setattr(trainer._teacher, "step_finished", passing(trainer._teacher.step_finished, 128))
    trainer.add_callback(Later(hours))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    expected = {
        "generation": 1 * batches,
        "reward": 2 * batches,
        "teacher": 0 if grpo else 4 * batches + 8 * (micro if alive else batches),
        "student": 16 * micro,
        "backward": 32 * micro,
        "optimizer": 64,
        "teacher_update": 0 if grpo else 128,
        "other": 0,
    }
    for row, outside in zip(rows, (500, 1000), strict=True):
        assert times(row) == {**expected, "step": sum(expected.values()), "outside": outside}


class Later(TrainerCallback):
    """What a user's callback does behind the step."""

    def __init__(self, hours):
        self.hours = hours

    def on_step_end(self, args, state, control, **kwargs):
        self.hours.pass_(1000)


def test_the_parts_add_up_to_the_steps_time_by_another_clock(tmp_path):
    trainer = tiny.trainer(tmp_path, slow(tiny.telling(), 0.05), max_steps=5)
    handler, spent, starts = trainer.callback_handler, [], []
    begin, end = handler.on_step_begin, handler.on_step_end
    handler.on_step_begin = lambda *args: (starts.append(time.perf_counter()), begin(*args))[1]
    handler.on_step_end = lambda *args: (end(*args), spent.append(time.perf_counter() - starts[-1]))[0]
    trainer.train()
    measured = [times(row) for row in trainer.state.log_history if "loss" in row]
    assert len(measured) == 5
    for row in measured:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step"])
    assert sum(row["step"] for row in measured) == pytest.approx(sum(spent), rel=0.05)
    # What is not told apart: shuffling, callbacks, advantages.
    assert sum(row["other"] for row in measured) < 0.35 * sum(spent)


def test_log_probabilities_beside_the_loss_are_the_students_time(tmp_path, monkeypatch):
    passes = GRPOTrainer._get_per_token_logps_and_entropies
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", slow(passes, 0.05))
    # Rollouts that outlive an optimizer step need the old ones; the anchor needs those of the start.
    trainer = tiny.trainer(tmp_path, tiny.telling(), max_steps=1, beta=0.1, steps_per_generation=2)
    trainer.train()
    measured = times(trainer.state.log_history[0])
    assert measured["student"] > 0.15 and measured["other"] < 0.05
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


def test_an_evaluation_and_what_else_lies_between_steps_is_outside(tmp_path):
    trainer = tiny.trainer(
        tmp_path, slow(tiny.telling(), 0.05), max_steps=2, eval_strategy="steps", eval_steps=1,
        trainer_eval_dataset=tiny.prompts(4), per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    first, second = (times(row) for row in trainer.state.log_history if "loss" in row)
    assert first["outside"] == 0.0
    assert second["outside"] > 0.2  # 4 batches of evaluation, which are graded too
    assert second["reward"] < second["outside"] - 0.1
    assert not any("time" in name for row in trainer.state.log_history if "eval_loss" in row for name in times(row))


def test_measuring_costs_next_to_nothing():
    clock = StepClock(HOST)
    start = time.perf_counter()
    for _ in range(200):
        clock.start()
        for _ in range(20):
            with clock.part("student"):
                pass
        clock.stop()
    clock.flush()
    assert (time.perf_counter() - start) / 200 < 1e-3  # a step's worth of parts


# Bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def errors_to(stream, monkeypatch, patience=0.0, tick=0.01):
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    monkeypatch.setattr(progress, "_TICK", tick)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield


def test_generation_counts_tokens_and_grading_shows_its_time(tmp_path, monkeypatch):
    trainer = tiny.trainer(
        tmp_path, slow(tiny.telling(), 0.1), max_steps=1, disable_tqdm=False, generation_kwargs={"min_new_tokens": 6}
    )
    trainer.callback_handler.callbacks = [
        x for x in trainer.callback_handler.callbacks if type(x).__name__ != "ProgressCallback"
    ]
    monkeypatch.setattr(progress.tqdm, "monitor_interval", 0)
    steps = []
    counted = trainer._generate_single_turn

    def generate(*args, **kwargs):
        hooks = len(trainer.model._forward_hooks)
        result = counted(*args, **kwargs)
        steps.append((hooks, len(trainer.model._forward_hooks)))
        return result

    trainer._generate_single_turn = generate
    stream = Terminal()
    with errors_to(stream, monkeypatch):
        trainer.train()
    shown = stream.getvalue()
    assert "generating 8 answers" in shown and "/6 [" in shown
    assert "grading 8 answers (later) [00:00]" in shown
    assert steps == [(0, 0)] and not trainer.model._forward_hooks
    assert shown.replace("\r", "\n").splitlines()[-1].strip() == ""  # they leave no trace


@pytest.mark.parametrize("quiet", ["disable_tqdm", "no terminal"])
def test_where_nobody_looks_no_bar_is_shown(tmp_path, monkeypatch, quiet):
    stream = Terminal() if quiet == "disable_tqdm" else io.StringIO()
    trainer = tiny.trainer(tmp_path, slow(tiny.telling(), 0.05), max_steps=1, disable_tqdm=quiet == "disable_tqdm")
    trainer.callback_handler.callbacks = [
        x for x in trainer.callback_handler.callbacks if type(x).__name__ != "ProgressCallback"
    ]
    with errors_to(stream, monkeypatch):
        trainer.train()
    assert "answers" not in stream.getvalue()


def test_what_is_short_shows_nothing_and_an_error_takes_the_bar_along(monkeypatch):
    stream = Terminal()
    with errors_to(stream, monkeypatch, patience=5.0), progress.waiting("soon", shown=True, total=3) as count:
        count()
    assert "soon" not in stream.getvalue()
    with errors_to(stream, monkeypatch), pytest.raises(KeyError), progress.waiting("long", shown=True):
        time.sleep(0.05)
        raise KeyError
    assert "long [00:00]" in stream.getvalue()
    assert not [t for t in __import__("threading").enumerate() if t.name == "sdpo-progress"]


# The run's log


def test_the_log_holds_what_was_logged_warned_and_set(tmp_path):
    trainer = tiny.trainer(tmp_path, tiny.never, max_steps=4, diagnostics_warning_interval=2, learning_rate=2e-3)
    trainer.train()
    kept = records(tmp_path)
    assert [r["kind"] for r in kept][:2] == ["session", "begin"] and kept[-1]["kind"] == "end"
    logged = [r for r in kept if r["kind"] == "log"]
    for record, row in zip(logged[:-1], trainer.state.log_history[:-1], strict=True):
        assert {**record["values"], "step": record["step"]} == row
    assert "train_runtime" in logged[-1]["values"]
    warned = [r for r in kept if r["kind"] == "warning"]
    assert [r["step"] for r in warned if "no rollout succeeded" in r["text"]] == [1, 3]
    assert kept[0]["settings"]["learning_rate"] == [2e-3, 1e-6] and kept[0]["rewards"] == ["never"]
    assert kept[1]["max_steps"] == 4


@pytest.mark.parametrize("set_up", [False, True])
def test_warnings_reach_the_terminal_as_before(tmp_path, monkeypatch, set_up):
    stream, own = io.StringIO(), io.StringIO()
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(stream))
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(own)] if set_up else [])
    log = RunLog(tmp_path / RUN_LOG, lambda: 7, lambda: True)
    with log.recording():
        logging.getLogger("sdpo_trl.metrics").warning("heed this")
        logging.getLogger("sdpo_trl.metrics").info("not this")
    assert (stream.getvalue(), own.getvalue()) == (("", "heed this\n") if set_up else ("heed this\n", ""))
    assert [(r["step"], r["text"]) for r in records(tmp_path) if r["kind"] == "warning"] == [(7, "heed this")]


def test_a_run_that_breaks_says_why(tmp_path):
    def broken(completions, **kwargs):
        raise ZeroDivisionError("nothing to grade")

    trainer = tiny.trainer(tmp_path, broken)
    handlers = list(logging.getLogger("sdpo_trl").handlers)
    with pytest.raises(RuntimeError):
        trainer.train()
    last = records(tmp_path)[-1]
    assert last["kind"] == "error" and last["error"] == "RewardError" and "nothing to grade" in last["text"]
    assert logging.getLogger("sdpo_trl").handlers == handlers


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path):
    tiny.trainer(tmp_path, tiny.telling(), max_steps=2, save_strategy="steps", save_steps=1).train()
    tiny.trainer(tmp_path, tiny.telling(), max_steps=4, save_strategy="steps", save_steps=1).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "begin"] == [0, 1]
    assert [r["step"] for r in records(tmp_path) if "loss" in r.get("values", {})] == [1, 2, 2, 3, 4]


def test_a_disk_that_refuses_the_log_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / RUN_LOG).mkdir()
    trainer = tiny.trainer(tmp_path, tiny.telling(), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert sum("is not written any more" in message for message in caplog.messages) == 1


def test_no_secret_and_no_place_is_among_the_settings(tmp_path):
    args = tiny.config(
        tmp_path, hub_token="hf_secret", push_to_hub=False, hub_model_id="me/mine",
        model_init_kwargs={"token": "hf_secret"}, distillation_alpha=float("1.0"), token_weighting="teacher_entropy",
    )  # fmt: skip
    settings = changed_settings(args)
    assert settings["distillation_alpha"] == (1.0, 0.5)
    assert settings["token_weighting"] == ("teacher_entropy", "none")  # which is about tokens of another kind
    assert "hf_secret" not in json.dumps(settings) and str(tmp_path) not in json.dumps(settings)


def test_numbers_that_are_none_survive(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", lambda: 3, lambda: True)
    log.write("log", values={"a": float("nan"), "b": float("-inf"), "c": None, "d": torch.tensor(2.0), "e": {1}})
    log.write("log", values={"text": "\ud800 half"})
    first, second = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert first["values"] == {"a": "nan", "b": "-inf", "c": None, "d": 2.0, "e": [1]}
    assert second["values"]["text"] == "\ud800 half"
    RunLog(tmp_path / "other.jsonl", lambda: 3, lambda: False).write("log")
    assert not (tmp_path / "other.jsonl").exists()


KILLED = """
import sys, tiny, os, signal
def reward(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(completions)
tiny.trainer(sys.argv[1], reward, max_steps=5).train()
"""


def test_a_killed_run_leaves_its_log(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parent, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    kept = records(tmp_path)
    assert [r["step"] for r in kept if r["kind"] == "log"] == [1, 2]
    assert kept[-1]["kind"] != "end" and kept[0]["process"] != os.getpid()
