"""What lasts: journals that are cut off, replayed, trained on; folders that others read; sessions that are killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import online_worker
import psutil
import pytest
import talk
import tiny
import torch
from datasets import Dataset
from peft import PeftModel
from talk import PLAIN
from transformers import TrainerCallback

from sdpo_trl.online import Call, OnlineSession, OnlineTrainer, SessionError, conversation, journal_rows, read_journal
from sdpo_trl.online.journal import Journal

CALL = Call("write_file", {"path": "a.txt", "text": "hello"})
WORKER = Path(__file__).with_name("online_worker.py")


def lived(tmp_path, monkeypatch, name="journal.jsonl"):
    """A session with two episodes, three updates of which one was taken back, and a pending answer."""
    session = talk.session(tmp_path, session_journal=tmp_path / name)
    talk.answering(monkeypatch, "bad$", "worse$", PLAIN, "bad again$", "pending$")
    session.say("write hello")
    session.respond()
    session.deny("no", solution=CALL)
    session.learn()
    session.retry()
    session.deny("still no")
    session.learn()
    session.undo()
    session.retry()
    session.approve()
    session.say("more")
    session.respond()
    session.deny("that is not more")
    session.learn()
    session.retry()
    return session


def visible(folder):
    """What is there, but for the trainer's own log."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("_run_log"))


def same(one, two):
    assert one._state.record() == two._state.record()
    assert one.updates == two.updates and one.version == two.version
    tiny.assert_equal(tiny.trained(one.trainer.model), tiny.trained(two.trainer.model))
    tiny.assert_equal(one.trainer._stores["teacher"].copied(), two.trainer._stores["teacher"].copied())
    assert torch.equal(one.next_token(), two.next_token())


# Journals


def test_a_journal_continues_the_session(tmp_path, monkeypatch):
    first = lived(tmp_path, monkeypatch)
    with pytest.raises(SessionError, match="Another session writes"):
        talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    first.close()
    second = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    same(first, second)
    for session in (first, second):
        if session is first:
            session._journal = session._updates._journal = None
        session.deny("no")
        session.learn()
    same(first, second)


def test_a_saved_folder_shortens_the_way(tmp_path, monkeypatch):
    first = lived(tmp_path, monkeypatch)
    first.save(tmp_path / "saved")
    first.deny("no")
    first.learn()
    first.close()
    made = []
    monkeypatch.setattr(
        OnlineTrainer, "update", lambda self, rows, update=OnlineTrainer.update: made.append(1) or update(self, rows)
    )
    second = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    assert len(made) == 1
    same(first, second)
    second.close()
    third = OnlineSession.load(
        tmp_path / "saved", tiny.build_model(max_position_embeddings=4096), args=talk.options(tmp_path),
        tools=talk.Files().tools, journal=tmp_path / "journal.jsonl",
    )  # fmt: skip
    assert len(made) == 2
    same(first, third)
    third.close()
    (tmp_path / "saved" / "session.json").unlink()
    fourth = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    assert len(made) == 5  # from a fresh adapter
    same(first, fourth)


def test_updates_that_were_taken_back_after_a_save_are_not_in_the_folder_s_weights(tmp_path, monkeypatch):
    first = lived(tmp_path, monkeypatch)
    first.save(tmp_path / "saved")
    first.undo()
    first.close()
    same(first, talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl"))
    with pytest.raises(ValueError, match="do not belong together"):
        OnlineSession.load(
            tmp_path / "saved", tiny.build_model(max_position_embeddings=4096), args=talk.options(tmp_path),
            journal=first._journal.path,
        )  # fmt: skip


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_a_line_that_was_cut_off_is_passed_over(tmp_path, monkeypatch, caplog, cut):
    session = lived(tmp_path, monkeypatch)
    session.close()
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    events = read_journal(path)
    assert "cut off while it was written" in caplog.text
    assert len(events) == whole.count(b"\n") - 1
    again = talk.session(tmp_path, session_journal=path)
    assert again.pending is None and again.updates == 2  # the answer was not on the disk yet
    talk.answering(monkeypatch, "pending$")
    again.respond()
    again.close()
    assert read_journal(path)[:-1] == events and path.read_bytes().endswith(b"\n")


def test_what_is_no_journal_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "said"}\nhello\n{"event": "said"}\n')
    with pytest.raises(ValueError, match="line 2 is no event"):
        Journal(path)
    path.write_text('[1]\n{"event": "said"}\n')
    with pytest.raises(ValueError, match="line 1 is no event of a session"):
        read_journal(path)
    path.write_text('{"event": "opened", "format": 99}\n')
    with pytest.raises(ValueError, match="has the format 99"):
        read_journal(path)


def test_the_correction_is_on_the_disk_before_the_update(tmp_path, monkeypatch):
    session = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    talk.answering(monkeypatch, "bad$")
    session.say("write hello")
    session.respond()
    session.deny("no")
    seen = []

    def look(progress):
        if progress.stage == "journal":
            seen.extend(json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines())

    session.learn(look)
    assert [event["event"] for event in seen] == ["opened", "said", "replied", "denied", "update"]
    assert seen[-1]["rows"][0]["privileged_context"] == "no"


def test_a_killed_update_is_made_and_an_interrupted_one_is_not(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session = lived(tmp_path, monkeypatch)
    session.deny("no")

    def interrupt(progress):
        if progress.stage == "student":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.learn(interrupt)
    session.close()
    interrupted = talk.session(tmp_path, session_journal=path)
    same(session, interrupted)
    interrupted.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "aborted"
    path.write_bytes(b"".join(lines[:-1]))  # as if it had been killed there
    killed = talk.session(tmp_path, session_journal=path)
    assert killed.updates == session.updates + 1


def test_a_tool_that_ran_when_the_session_died_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session = talk.session(tmp_path, session_journal=path)
    talk.answering(monkeypatch, PLAIN)
    session.say("write hello")
    session.respond()
    session.approve()
    session.close()
    lines = path.read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["event"] for line in lines]
    path.write_bytes(b"".join(lines[: kinds.index("observed")]))
    again = talk.session(tmp_path, session_journal=path)
    assert again.messages[-1]["role"] == "tool" and "ended while this tool ran" in again.messages[-1]["content"]
    again.close()
    assert talk.session(tmp_path, session_journal=path).messages == again.messages


# A journal as a dataset


def test_a_journal_is_a_dataset_for_the_ordinary_trainer(tmp_path, monkeypatch):
    lived(tmp_path, monkeypatch).close()
    rows = journal_rows(tmp_path / "journal.jsonl")
    assert [(r["privileged_context"], r["demonstration"]) for r in rows] == [
        ("no", PLAIN.removesuffix("$")), ("that is not more", None),
    ]  # fmt: skip
    names = ("messages", "privileged_context", "demonstration", "tools")
    data = Dataset.from_list([{name: row[name] for name in names} for row in rows])
    trainer = tiny.trainer(
        tmp_path, None, model=tiny.build_model(max_position_embeddings=4096), data=data, num_generations=1,
        use_successful_as_teacher=False, reprompt_placement="append", per_device_train_batch_size=2, max_steps=2,
        trainer_processing_class=tiny.tool_tokenizer(), trainer_tools=talk.Files().tools,
    )  # fmt: skip
    before = tiny.trained(trainer.model)
    trainer.train()
    logs = tiny.training_logs(trainer)
    assert [row["sdpo/distilled_share"] for row in logs] == [1.0, 1.0] and logs[0]["loss"] > 0
    assert logs[0]["sdpo/demonstration_share"] == 0.5
    assert any(not torch.equal(before[name], value) for name, value in tiny.trained(trainer.model).items())


def test_a_journal_s_own_answers_are_trained_on_in_batches(tmp_path, monkeypatch):
    lived(tmp_path, monkeypatch).close()
    rows = journal_rows(tmp_path / "journal.jsonl")
    args = talk.options(tmp_path, per_device_train_batch_size=2, max_steps=3)
    trainer = OnlineTrainer(
        tiny.build_model(max_position_embeddings=4096), args, Dataset.from_list(rows),
        processing_class=tiny.tool_tokenizer(),
    )  # fmt: skip
    seen = []
    teacher_rows = trainer._teacher_rows
    monkeypatch.setattr(trainer, "_teacher_rows", lambda out, inputs: seen.append(out) or teacher_rows(out, inputs))
    trainer.train()
    answers = {tuple(row["completion_ids"]) for row in rows}
    for batch in seen:
        ids = [row[mask.bool()] for row, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
        assert {tuple(row.tolist()) for row in ids} == answers
    assert len(seen) == 3 and trainer.state.global_step == 3


# Folders


def test_the_saved_folder_loads_everywhere_with_the_same_distribution(tmp_path, monkeypatch):
    base = tmp_path / "base"
    tiny.build_model(max_position_embeddings=4096).save_pretrained(base)
    session = talk.session(tmp_path, model=str(base))
    talk.answering(monkeypatch, "bad$", "next$")
    session.say("write hello")
    session.respond()
    session.deny("no", solution=CALL)
    session.learn()
    folder = tmp_path / "saved"
    session.save(folder)
    truth = session.next_token()
    ids = torch.tensor([session._prompt_ids(session.messages)])

    adapted = PeftModel.from_pretrained(
        type(session.trainer._tap.model).from_pretrained(base), folder, is_trainable=True
    )
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits[0, -1].log_softmax(-1), truth, atol=1e-5)

    ordinary = tiny.trainer(tmp_path / "o", model=adapted, trainer_processing_class=tiny.tool_tokenizer())
    with torch.no_grad():
        assert torch.allclose(ordinary.model(ids).logits[0, -1].log_softmax(-1), truth, atol=1e-5)
    weights = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            weights.update(tiny.trained(model))

    rows = Dataset.from_list([{"prompt": session.messages, "privileged_context": "no"}] * 8)
    resumed = tiny.trainer(
        tmp_path / "r", None, model=str(base), data=rows, trainer_peft_config=tiny.lora(), num_generations=1,
        trainer_processing_class=tiny.tool_tokenizer(), use_successful_as_teacher=False, max_steps=2,
    )  # fmt: skip
    resumed.add_callback(Look())
    resumed.train(resume_from_checkpoint=str(folder))
    tiny.assert_equal(weights, tiny.trained(session.trainer.model))

    options = talk.options(tmp_path)
    again = OnlineSession.load(folder, args=options, tools=talk.Files().tools)  # the adapter knows its base
    assert torch.equal(again.next_token(), truth)
    assert again.messages == session.messages and again.attempts == session.attempts and again.updates == 1
    assert again.metrics == session.metrics and again.trainer.state.global_step == 1
    for each in (session, again):
        each.learn()
    tiny.assert_equal(tiny.trained(session.trainer.model), tiny.trained(again.trainer.model))
    session.save(folder)  # over itself
    assert OnlineSession.load(folder, args=options).updates == 2
    assert visible(tmp_path) == ["base", "o", "r", "saved"]


def test_full_fine_tuning_saves_a_whole_model(tmp_path, monkeypatch):
    session = talk.session(tmp_path, session_peft_config=None, learning_rate=1e-3)
    talk.answering(monkeypatch, "bad$")
    session.say("write hello")
    session.respond()
    session.deny("no")
    session.learn()
    session.save(tmp_path / "saved")
    given = {"args": talk.options(tmp_path, learning_rate=1e-3), "tools": talk.Files().tools}
    alone = OnlineSession.load(tmp_path / "saved", **given)  # with another attention, by default
    assert torch.allclose(alone.next_token(), session.next_token(), atol=1e-5)
    again = OnlineSession.load(tmp_path / "saved", tiny.build_model(max_position_embeddings=4096), **given)
    assert torch.equal(again.next_token(), session.next_token())
    for each in (session, again):
        each.learn()
    tiny.assert_equal(tiny.trained(session.trainer.model), tiny.trained(again.trainer.model))


def test_a_journal_that_begins_with_a_saved_session_needs_its_folder(tmp_path, monkeypatch):
    first = lived(tmp_path, monkeypatch)
    first.save(tmp_path / "saved")
    first.close()
    model, options = tiny.build_model(max_position_embeddings=4096), talk.options(tmp_path)
    second = OnlineSession.load(
        tmp_path / "saved", model, args=options, tools=talk.Files().tools, journal=tmp_path / "new.jsonl"
    )
    second.deny("no")
    second.learn()
    second.close()
    third = talk.session(tmp_path, session_journal=tmp_path / "new.jsonl")
    assert third.updates == 3
    tiny.assert_equal(tiny.trained(second.trainer.model), tiny.trained(third.trainer.model))
    third.close()
    (tmp_path / "saved" / "session.json").unlink()
    with pytest.raises(ValueError, match=r"goes on from the session in .*saved, which is not there"):
        talk.session(tmp_path, session_journal=tmp_path / "new.jsonl")


def test_a_folder_that_another_session_saved_over_is_not_taken(tmp_path, monkeypatch):
    first = lived(tmp_path, monkeypatch)
    first.save(tmp_path / "saved")
    first.close()
    other = lived(tmp_path, monkeypatch, "other.jsonl")
    other.save(tmp_path / "saved")
    same(first, talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl"))


def test_other_options_than_the_journal_s_are_told(tmp_path, monkeypatch, caplog):
    lived(tmp_path, monkeypatch).close()
    talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl", learning_rate=5e-3).close()
    assert "other options" in caplog.text and "learning_rate=0.005 (was 0.01)." in caplog.text


def test_a_save_that_was_killed_leaves_the_older_one(tmp_path, monkeypatch):
    session = lived(tmp_path, monkeypatch)
    session.save(tmp_path / "saved")
    (tmp_path / "saved").rename(tmp_path / ".saved.replaced")  # killed between the two renames
    (tmp_path / ".saved-x.partial").mkdir()  # and another time while it wrote
    given = {"args": talk.options(tmp_path), "tools": talk.Files().tools}
    again = OnlineSession.load(tmp_path / "saved", tiny.build_model(max_position_embeddings=4096), **given)
    same(session, again)
    again.save(tmp_path / "saved")
    assert visible(tmp_path) == ["journal.jsonl", "saved"]


def test_folders_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="The journal lies in"):
        talk.session(tmp_path, session_journal=tmp_path / "in" / "journal.jsonl").save(tmp_path / "in")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    session = talk.session(tmp_path)
    with pytest.raises(FileExistsError, match="something else"):
        session.save(tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match=r"no session\.json"):
        OnlineSession.load(tmp_path / "mine")
    session.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="does not know its base model"):
        OnlineSession.load(tmp_path / "saved", args=talk.options(tmp_path))
    whole = (tmp_path / "saved" / "optimizer.pt").read_bytes()
    (tmp_path / "saved" / "optimizer.pt").write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"optimizer\.pt"):
        OnlineSession.load(tmp_path / "saved", tiny.build_model())


# Kills


@pytest.fixture
def nursery():
    """A process that starts sessions which are killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(WORKER)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()


def killed(nursery, folder, goal, lines):
    """Let a session live and kill it somewhere after its journal has so many lines; whether it was still running."""
    journal = folder / "journal.jsonl"
    nursery.stdin.write(f"{folder}\t{goal}\n")
    nursery.stdin.flush()
    pid = int(nursery.stdout.readline())
    while psutil.pid_exists(pid) and (not journal.is_file() or journal.read_bytes().count(b"\n") < lines):
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 0.03))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    status = int(nursery.stdout.readline())
    assert status == 0 or os.WIFSIGNALED(status), "the session broke"
    return status != 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("goal", "kills"), [(4, 2), pytest.param(20, 10, marks=pytest.mark.slow)])
def test_a_session_that_is_killed_at_random_moments_loses_nothing(tmp_path, monkeypatch, nursery, goal, kills):
    """It ends with the conversation, weights, teacher and optimizer of one that was left alone."""
    monkeypatch.setattr(conversation, "sample", online_worker.scripted)
    truth, broken = tmp_path / "truth", tmp_path / "broken"
    for folder in (truth, broken):
        folder.mkdir()
    expected = online_worker.live(truth, goal)
    total = len(read_journal(truth / "journal.jsonl"))
    moments = sorted(random.Random(0).sample(range(2, total - 3), kills))
    died = sum(killed(nursery, broken, goal, lines) for lines in moments)
    assert online_worker.live(broken, goal) == expected and expected["step"] == goal
    one, two = (journal_rows(folder / "journal.jsonl") for folder in (truth, broken))
    assert one == two
    print(f"{died} of {kills} sessions were killed; the journal has {total} lines")
    assert died >= kills / 2


# Bounds


@pytest.mark.slow
def test_memory_stays_flat_over_two_hundred_updates(tmp_path, monkeypatch):
    session = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    answers = talk.answering(monkeypatch)
    sizes = []
    for _ in range(200):
        answers.append("bad$")
        session.say("write hello")
        session.respond()
        session.deny("no", solution=CALL)
        session.learn()
        session.clear()
        sizes.append(psutil.Process().memory_info().rss / 2**20)
    early, late = sum(sizes[30:50]) / 20, sum(sizes[-20:]) / 20
    print(f"{early:.1f} MiB after 40 updates, {late:.1f} after 190")
    assert late - early < 8
    assert session.updates == 200
