"""A session: what is said, denied, learned, tried again, taken back, and what it refuses."""

import ast
import math
from pathlib import Path

import pytest
import talk
import tiny
import torch
import trl
from talk import BROKEN, FAILING, PLAIN
from test_online_trainer import KINDS
from transformers import TrainerCallback

import sdpo_trl
from sdpo_trl.online import Call, ContextTooLong, OnlineSession, Progress, SessionError, online_config
from sdpo_trl.online.calls import Dialect, ToolSet, _behind, dialect_of

CALL = Call("write_file", {"path": "a.txt", "text": "hello"})


def begun(tmp_path, monkeypatch, *answers, **given):
    session = talk.session(tmp_path, **given)
    left = talk.answering(monkeypatch, *answers)
    session.say("write hello to a.txt")
    return session, left


# Talking


def test_an_approved_call_runs_and_joins_the_conversation(tmp_path, monkeypatch):
    files = talk.Files()
    session, left = begun(tmp_path, monkeypatch, PLAIN, files=files)
    reply = session.respond()
    assert reply.call == CALL and reply.error is None and not files.written and session.pending == reply
    observations = session.approve()
    assert files.written == [("a.txt", "hello")] and session.pending is None
    assert [(o.text, o.ok) for o in observations] == [("wrote a.txt", True)]
    assert [turn["role"] for turn in session.messages] == ["system", "user", "assistant", "tool"]
    left.append("done$")
    assert session.respond().text == "done" and session.approve() == []
    assert session.messages[-1] == {"role": "assistant", "content": "done"}
    session.clear()
    assert session.messages == [talk.SYSTEM]


def test_several_calls_run_in_order(tmp_path, monkeypatch):
    files = talk.Files()
    both = PLAIN.removesuffix("$") + '<tool_call>{"name": "count", "arguments": {}}</tool_call>$'
    session, _ = begun(tmp_path, monkeypatch, both, files=files)
    assert [call.name for call in session.respond().calls] == ["write_file", "count"]
    assert [o.text for o in session.approve()] == ["wrote a.txt", "1"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (BROKEN, "could not be read"),
        ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>$', "There is no tool 'fly'. The tools: write_file"),
        ("no end", "cut off after 100 tokens"),
    ],
)
def test_what_is_wrong_by_itself_joins_the_correction(tmp_path, monkeypatch, answer, error):
    session, _ = begun(tmp_path, monkeypatch, answer)
    reply = session.respond()
    assert error in reply.error and reply.truncated == ("cut off" in error)
    attempt = session.deny()
    assert error in attempt.told and session.attempts == (attempt,)


def test_a_failed_tool_s_own_output_joins_the_correction(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, FAILING)
    session.respond()
    assert [(o.text, o.ok) for o in session.approve()] == [
        ("Error: nothing can be written there. Take another path.", False)
    ]
    attempt = session.deny("Not there.", environment_feedback="The disk is full.")
    assert attempt.told.split("\n\n") == [
        "Not there.",
        "The disk is full.",
        "[write_file replied] Error: nothing can be written there. Take another path.",
    ]
    assert [turn["role"] for turn in session.messages] == ["system", "user"]  # what was approved is out again


def test_the_teacher_reads_the_conversation_and_one_turn_more(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, FAILING, log_completions=False)
    reply = session.respond()
    session.approve()
    session.deny("Not {there}.", solution=CALL)
    batches = []
    teacher_rows = session.trainer._teacher_rows

    def keep(output, inputs):
        batches.append({**output, **teacher_rows(output, inputs)})
        return batches[-1]

    monkeypatch.setattr(session.trainer, "_teacher_rows", keep)
    session.learn()
    read = batches[0]["teacher_prompt_ids"][0].tolist()
    header = session.trainer._tokenizer("<|assistant|>")["input_ids"]
    own = list(reply.prompt_ids)
    assert own[-len(header) :] == header and read[-len(header) :] == header
    assert (
        read[: len(own) - len(header)] == own[: -len(header)] == batches[0]["prompt_ids"][0].tolist()[: -len(header)]
    )
    added = session.trainer._tokenizer.decode(read[len(own) - len(header) :])
    assert added.startswith("<|user|>") and added.count("<|user|>") == 1
    for part in (
        "Not {there}.",
        "Take another path.",
        '<tool_call>{"name": "write_file", "arguments": {"path": "a.txt"',
    ):
        assert part in added
    assert batches[0]["completion_ids"][0].tolist() == list(reply.ids)


def test_an_edited_call_runs_and_is_the_demonstration(tmp_path, monkeypatch):
    files = talk.Files()
    session, _ = begun(tmp_path, monkeypatch, BROKEN, files=files)
    prompt = session.messages
    session.respond()
    with pytest.raises(ValueError, match="no tool 'fly'"):
        session.approve_edited(Call("fly", {}))
    session.approve_edited(CALL)
    assert files.written == [("a.txt", "hello")] and session.messages[-2]["tool_calls"] == [CALL.function]
    (attempt,) = session.attempts
    assert attempt.solution == PLAIN.removesuffix("$") and "could not be read" in attempt.told
    before = session.score(CALL, prompt)
    with pytest.raises(SessionError, match="you wrote yourself"):
        session.deny("no")
    for _ in range(3):
        session.learn()
    assert session.updates == 3 and session.score(CALL, prompt) != before
    assert session.messages[-1]["content"] == "wrote a.txt"


def test_an_approved_answer_is_the_demonstration_of_those_denied_before_it(tmp_path, monkeypatch):
    session, left = begun(tmp_path, monkeypatch, BROKEN, PLAIN)
    session.respond()
    session.deny("bad")
    assert session.retry().call == CALL
    session.approve()
    assert [a.solution for a in session.attempts] == [PLAIN.removesuffix("$")]
    session.learn()
    assert session.metrics[-1]["sdpo/demonstration_share"] == 1.0
    session.say("and now?")
    left.append("x$")
    session.respond()
    session.deny("bad")  # another prompt: another episode
    assert [a.reply.text for a in session.attempts] == ["x"]


def test_ranked_candidates(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "bad$", PLAIN, "worse$", "so so$")
    replies = session.sample_candidates(4)
    assert session.pending is None and session.candidates == replies
    with pytest.raises(ValueError, match="once at most"):
        session.rank([1], [1])
    with pytest.raises(ValueError, match="0 to 3"):
        session.rank([1], [4])
    assert session.rank([1], [0, 2], {2: "worse than bad"}) == replies[1] == session.pending
    assert [(a.reply.text, a.feedback, bool(a.solution)) for a in session.attempts] == [
        ("bad", None, True), ("worse", "worse than bad", True),
    ]  # fmt: skip
    assert session.learn()["sdpo/distilled_share"] == 1.0
    assert session.approve()[0].ok


def test_candidates_without_a_right_one_need_a_text(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "a$", "b$")
    session.sample_candidates(2)
    with pytest.raises(ValueError, match="Nothing is said"):
        session.rank([], [0, 1])
    assert session.rank([], [0, 1], "both bad") is None and len(session.attempts) == 2


def test_an_interrupted_tool_leaves_no_call_without_a_reply(tmp_path, monkeypatch):
    both = PLAIN.removesuffix("$") + PLAIN
    session, left = begun(tmp_path, monkeypatch, both, session_journal=tmp_path / "journal.jsonl")

    def interrupted(path, text):
        raise KeyboardInterrupt

    session._tools.functions["write_file"] = interrupted
    session.respond()
    with pytest.raises(KeyboardInterrupt):
        session.approve()
    assert [turn["role"] for turn in session.messages[2:]] == ["assistant", "tool", "tool"]
    assert "interrupted" in session.messages[-1]["content"]
    session.close()
    again = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    assert again.messages == session.messages
    left.append("I see$")
    assert again.respond().text == "I see"


# Sampling


def test_what_is_sampled_is_streamed_and_its_log_probabilities_are_the_loss_s(tmp_path):
    session = talk.session(tmp_path, temperature=0.8, top_k=20, max_completion_length=12)
    session.say("hello")
    pieces = []
    reply = session.respond(pieces.append)
    assert "".join(pieces) == reply.text and len(pieces) > 1
    session.deny("no")
    replies = [reply, *session.sample_candidates(3)]
    values = session.trainer.log_probs([(list(r.prompt_ids), list(r.ids)) for r in replies])
    for sampled, truth in zip(replies, values, strict=True):
        assert sampled.logprobs == pytest.approx(truth, abs=1e-4)
    assert len({r.ids for r in replies}) == 4


def test_candidates_equal_single_answers_where_nothing_is_left_to_chance(tmp_path):
    session = talk.session(tmp_path, top_k=1, max_completion_length=12)
    session.say("hello")
    alone = session.respond()
    session.deny("no")
    assert {reply.ids for reply in session.sample_candidates(3)} == {alone.ids}


# Learning


@pytest.mark.parametrize("kind", KINDS)
def test_learning_moves_towards_the_correction_and_undo_takes_it_back(tmp_path, monkeypatch, kind):
    session, left = begun(tmp_path, monkeypatch, "bad answer$", teacher_model_kind=kind, **KINDS[kind])
    session.respond()
    session.deny("wrong", solution=CALL)
    first = session.next_token()
    start = tiny.trained(session.trainer.model)
    stages: list[Progress] = []
    logs = session.learn(stages.append)
    assert [(p.stage, p.done) for p in stages] == [
        ("journal", 1), ("teacher", 2), ("student", 3), ("step", 4), ("done", 5),
    ]  # fmt: skip
    assert logs["loss"] > 0 and logs["grad_norm"] > 0 and logs["seconds"] > 0 and session.metrics == [logs]
    (change,) = session.changes()
    assert "".join(token.text for token in change.tokens) == "bad answer<eos>"
    assert [t.before for t in change.tokens] == pytest.approx(change.attempt.reply.logprobs, abs=1e-4)
    closer = [
        abs(t.after - t.teacher) < abs(t.before - t.teacher) for t in change.tokens if abs(t.before - t.teacher) > 0.3
    ]
    assert sum(closer) > len(closer) / 2
    moved = tiny.trained(session.trainer.model)
    left.append("worse$")
    session.retry()
    session.deny("still wrong")
    session.learn()  # both answers, by two sets of weights
    assert session.metrics[-1]["num_tokens"] > logs["num_tokens"] and session.updates == 2
    assert [len(c.tokens) for c in session.changes()] == [11, 6]
    session.undo()
    tiny.assert_equal(tiny.trained(session.trainer.model), moved)
    with pytest.raises(SessionError, match="no update to take back"):
        session.undo()
    assert session.updates == 1 and session.trainer.state.global_step == 1 and session.version == 3
    tiny.assert_equal(dict(start), start)
    assert not torch.equal(session.next_token(), first)


def test_several_updates_can_be_taken_back(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "bad$", session_undo_depth=3)
    session.respond()
    session.deny("wrong")
    states = []
    for _ in range(4):
        states.append((tiny.trained(session.trainer.model), dict(session.trainer._stores["teacher"].copied())))
        session.learn()
    for weights, teacher in reversed(states[1:]):
        session.undo()
        tiny.assert_equal(tiny.trained(session.trainer.model), weights)
        tiny.assert_equal(session.trainer._stores["teacher"].copied(), teacher)
    assert not session.can_undo and session.updates == 1


@pytest.mark.parametrize("stage", ["journal", "teacher", "student", "step", "done"])
def test_an_interrupted_update_leaves_everything_as_it_was(tmp_path, monkeypatch, stage):
    session, _ = begun(tmp_path, monkeypatch, "bad$")
    session.respond()
    session.deny("wrong")
    session.learn()
    weights, teacher = tiny.trained(session.trainer.model), session.trainer._stores["teacher"].copied()
    twin = talk.session(tmp_path, teacher_model_kind="ema")
    twin._state = session._state
    twin.learn()

    def interrupt(progress):
        if progress.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.learn(interrupt)
    tiny.assert_equal(tiny.trained(session.trainer.model), weights)
    tiny.assert_equal(session.trainer._stores["teacher"].copied(), teacher)
    assert session.updates == 1
    session.learn()
    twin.learn()
    tiny.assert_equal(tiny.trained(session.trainer.model), tiny.trained(twin.trainer.model))


def test_the_anchor_holds_what_was_not_corrected(tmp_path, monkeypatch):
    moved = {}
    for beta in (0.0, 3.0):
        session, _ = begun(tmp_path, monkeypatch, "bad$", beta=beta, teacher_model_kind="base")
        session.respond()
        session.deny("wrong", solution="a quite different text")
        before = session.next_token()
        for _ in range(8):
            session.learn()
        moved[beta] = (before.exp() * (before - session.next_token())).sum().item()
    assert moved[3.0] < 0.8 * moved[0.0]


# What it refuses


def test_the_order_of_things(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "a$")
    for wish in (session.approve, session.deny, session.retry, session.learn, session.undo, session.changes):
        with pytest.raises(SessionError):
            wish()
    with pytest.raises(SessionError, match="no candidates"):
        session.rank([0], [])
    session.respond()
    for wish in (
        lambda: session.say("x"),
        session.respond,
        lambda: session.sample_candidates(2),
        lambda: session.drop(1),
    ):
        with pytest.raises(SessionError, match="An answer is pending"):
            wish()
    with pytest.raises(ValueError, match="Nothing is said"):
        session.deny("  ")
    session.approve()
    with pytest.raises(SessionError, match="nothing to answer"):
        session.respond()
    with pytest.raises(IndexError, match="no turn 9"):
        session.drop(9)


def test_a_context_that_is_too_long_names_the_turn_to_drop(tmp_path, monkeypatch):
    model = tiny.build_model(max_position_embeddings=1300)
    session = talk.session(tmp_path, model=model, max_completion_length=60)
    left = talk.answering(monkeypatch, PLAIN, "ok$", "ok$")
    session.say("write hello")
    session.respond()
    session.approve()
    session.say("x" * 400)
    session.respond()
    session.approve()
    session.say("and now " + "y" * 200)
    used, room = session.context
    assert used > room
    with pytest.raises(ContextTooLong, match=r"Drop turn 4, user, 400 tokens, 'xxx.*`session.drop\(4\)`") as caught:
        session.respond()
    assert caught.value.turn == 4 and caught.value.tokens == used and caught.value.limit == room
    session.drop(caught.value.turn)
    assert session.respond().text == "ok" and not left
    session.deny("shorter")
    session.learn()  # the correction fits, too
    with pytest.raises(ContextTooLong, match="No turn can go"):
        tight = talk.session(tmp_path, model=tiny.build_model(max_position_embeddings=128))
        tight.say("x")
        tight.respond()


def test_a_call_goes_with_its_replies(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, PLAIN)
    session.respond()
    session.approve()
    session.drop(3)
    assert [turn["role"] for turn in session.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_generations": 2, "per_device_train_batch_size": 2}, "num_generations=1"),
        ({"gradient_accumulation_steps": 2}, "one optimizer step"),
        ({"num_iterations": 2}, "num_iterations=1"),
        ({"use_successful_as_teacher": True}, "approved answers become demonstrations"),
        ({"logging_steps": 5}, "every update is logged"),
        ({"lr_scheduler_type": "linear"}, "a session has none"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}, "whole number"),
    ],
)
def test_options_that_a_session_cannot_honour(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        talk.session(tmp_path, **given)


def test_a_schedule_ends(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "a$", lr_scheduler_type="linear", max_steps=2)
    session.respond()
    session.deny("no")
    rates = [session.learn()["learning_rate"] for _ in range(2)]
    assert rates == pytest.approx([1e-2, 5e-3])
    with pytest.raises(SessionError, match="all were made"):
        session.learn()


def test_tools_and_templates_that_cannot_be_used(tmp_path):
    def untold(path):
        return path

    with pytest.raises(Exception, match="docstring"):
        talk.session(tmp_path, session_tools=[untold])
    with pytest.raises(ValueError, match="Two tools are called 'count'"):
        talk.session(tmp_path, session_tools=[talk.Files().count, talk.Files().count])
    bare = tiny.build_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        talk.session(tmp_path, session_tokenizer=bare)
    with pytest.raises(TypeError, match="online_config"):
        OnlineSession(tiny.build_model(), tiny.build_tokenizer(), object())


def test_a_template_without_tools_gets_them_as_text(tmp_path, monkeypatch):
    files = talk.Files()
    body = PLAIN.removesuffix("$").replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>")
    answers = f"Well.\n{body}$", BROKEN
    session, _ = begun(tmp_path, monkeypatch, *answers, files=files, session_tokenizer=tiny.build_tokenizer())
    reply = session.respond()
    read = session.trainer._tokenizer.decode(reply.prompt_ids)
    assert read.startswith("<|system|>be good\n\nYou can call tools") and '"name": "write_file"' in read
    assert reply.call == CALL and reply.message["content"] == "Well."
    session.approve()
    assert files.written == [("a.txt", "hello")]
    again = session.respond()
    assert "<|user|>[write_file replied]\nwrote a.txt<|end|>" in session.trainer._tokenizer.decode(again.prompt_ids)
    assert "could not be read" in again.error and again.call is None
    session.deny(solution=CALL)
    assert session.attempts[0].solution == body
    assert session.score(CALL) == pytest.approx(session.score(session.attempts[0].solution), abs=1e-6)
    session.learn()


def test_a_template_without_a_system_turn_gets_it_all_in_the_first_user_turn(tmp_path, monkeypatch):
    tokenizer = tiny.build_tokenizer()
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuses + tokenizer.chat_template
    session, _ = begun(tmp_path, monkeypatch, PLAIN, session_tokenizer=tokenizer)
    reply = session.respond()
    read = tokenizer.decode(reply.prompt_ids)
    assert read.startswith("<|user|>be good\n\nYou can call tools") and read.count("<|user|>") == 1
    assert read.endswith("\n\nwrite hello to a.txt<|end|><|assistant|>") and reply.call == CALL
    assert session.messages[0] == talk.SYSTEM
    session.deny("no", solution=CALL)
    session.learn()


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "qwen3_instruct_2507", "glm4moe"])
def test_calls_are_written_as_they_are_read(name):
    """By chat templates of real models, with TRL's own parsers for them."""
    tokenizer = tiny.build_tokenizer()
    folder = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    dialect = dialect_of(tokenizer, ToolSet(talk.Files().tools), [1], {})
    assert type(dialect) is Dialect
    call = Call("write_file", {"path": "a", "text": 'x\ny {z} "quoted"'})
    messages = [talk.SYSTEM, {"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(messages, tools=dialect.schemas, add_generation_prompt=True)["input_ids"]
    ids = dialect.write(messages, dialect.message(call))
    assert ids[-1] == 1 and dialect.read(ids, prompt)[2:] == ((call,), None)


def test_a_turn_is_told_from_its_header():
    assert _behind("<a>\n<think>\n\n</think>\n\n", "<a>\n<tool_call>x") == "<tool_call>x"
    assert _behind("<a>\n", "<a>\nhello") == "hello"
    assert _behind("<a><think>\n", "<a>that") == "that"


def test_trackers_and_callbacks_see_a_session_as_one_run(tmp_path, monkeypatch):
    seen = []

    class Seen(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            seen.append("begin")

        def on_log(self, *args, logs, **kwargs):
            seen.append(f"log {'loss' in logs}")

        def on_train_end(self, *args, **kwargs):
            seen.append("end")

    session, _ = begun(tmp_path, monkeypatch, "a$")
    session.trainer.add_callback(Seen())
    session.respond()
    session.deny("no")
    session.learn()
    session.close()
    assert seen == ["log True", "end"]


def test_scores_are_exact(tmp_path):
    session = talk.session(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    steps = session.next_tokens("yes", messages)
    ids = tiny.answer_ids(session.trainer._tokenizer, "yes$")
    total = math.fsum(steps[i, token].item() for i, token in enumerate(ids))
    assert steps.shape == (4, 104) and session.score("yes", messages) == pytest.approx(total, abs=1e-5)
    assert torch.allclose(session.next_token(messages), steps[0], atol=1e-6)
    assert torch.allclose(steps.exp().sum(-1), torch.ones(4), atol=1e-5)


def test_the_core_does_not_know_the_session():
    package = Path(sdpo_trl.__file__).parent
    files = [path for path in package.rglob("*.py") if "online" not in path.relative_to(package).parts]
    assert len(files) > 60
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = getattr(node, "module", None) or ""
            assert not any("online" in part.split(".") for part in [module, *names]), path


def test_the_defaults_of_a_session_are_accepted(tmp_path):
    session = OnlineSession(tiny.build_model(), tiny.build_tokenizer(), online_config(str(tmp_path)))
    assert session.teacher == "ema" and session.messages == [] and session.tools == {}
