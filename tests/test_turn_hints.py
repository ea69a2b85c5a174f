"""Feedback per turn: read by the teacher alone, where the turn begins; and which turns are distilled then."""

import os
from importlib import resources
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_agents import Room, add, call, make, observed

from sdpo_trl.feedback import check_texts, join_texts, join_turns, reached_turns
from sdpo_trl.reprompt import Hint, hint_of
from sdpo_trl.turn_hints import TurnHintWriter, insert
from sdpo_trl.turns import span_mask, turn_index

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

FIRST = call("add", a=1, b=2)
THREE = [[FIRST + "$", FIRST + "$", "done$"]]


# Pure


def test_check_texts_takes_pairs_where_it_may():
    given = ["a", None, [(1, "b"), [0, "c"]], [(2, " ")], [], " "]
    assert check_texts(given, 6, "it", turns=True) == ["a", None, ((1, "b"), (0, "c")), None, None, None]
    with pytest.raises(TypeError, match="it gave a list as the text of rollout 2"):
        check_texts(given, 6, "it")
    for bad in ([1], [("a", 1)], [(1, "a", "b")], [(1, None)], ["ab"]):
        with pytest.raises(TypeError, match=r"rollout 1; a list must hold pairs `\(turn, text\)`"):
            check_texts(["x", bad], 2, "it", turns=True)
    for turn in (-1, True, 1.0, "0"):
        with pytest.raises(ValueError, match=r"it gave the turn .* for rollout 0"):
            check_texts([[(turn, "a")]], 1, "it", turns=True)


def test_texts_and_turns_are_joined_apart():
    sources = [["a", None, ((2, "x"), (0, "y"))], [((1, "t"),), "b", ((2, "z"),)]]
    assert join_texts(sources, 3) == ["a", "b", None]
    assert join_turns(sources, 3) == [((1, "t"),), (), ((0, "y"), (2, "x\n\nz"))]


def test_reached_turns():
    feedback = [((0, "a"), (1, "b"), (2, "c")), (), ((1, "d"),)]
    assert reached_turns(feedback, [2, 0, None]) == [((0, "a"), (1, "b")), (), ()]
    with pytest.raises(ValueError, match="turn 2 of rollout 0, which has 1 turns"):
        reached_turns(feedback, [1, 0, 5])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("s", "f", ()), Hint("s", "f")),
        ((None, None, [(0, "a")]), Hint(None, "a", (), (0,))),
        ((None, None, [(0, "a"), (2, "b")]), Hint(None, "a", ((2, "b"),), (0, 2))),
        ((None, None, [(1, "b")]), Hint(None, None, ((1, "b"),), (1,))),
        ((None, "f", [(0, "a"), (1, "b")]), Hint(None, "f\n\na", ((1, "b"),))),
        (("s", None, [(1, "b")]), Hint("s", None, ((1, "b"),))),
    ],
)
def test_hint_of(arguments, expected):
    assert hint_of(*arguments) == expected
    assert expected.changes_prompt == (expected.solution is not None or expected.feedback is not None)


def test_insert():
    assert insert([1, 2, 3], {}) == ([1, 2, 3], [0, 1, 2])
    assert insert([1, 2, 3], {0: [7], 2: [8, 9]}) == ([7, 1, 2, 8, 9, 3], [1, 2, 5])


def test_turn_index_and_span():
    sampled = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0], [0] * 8]).bool()
    turns = turn_index(sampled)
    assert turns.tolist() == [[0, 0, -1, 1, -1, -1, 2, 2], [-1, 0, 0, 0, -1, -1, -1, -1], [-1] * 8]
    late = Hint(turns=((1, "x"),), hinted=(1,))
    for hint, span, expected in (
        (late, "all", {0, 1, 2}),
        (late, "from_hint", {1, 2}),
        (late, "hinted_turn", {1}),
        (Hint(None, "a", ((2, "b"),), (0, 2)), "hinted_turn", {0, 2}),
        (Hint(None, "a", ((2, "b"),), (0, 2)), "from_hint", {0, 1, 2}),
        (Hint(None, "whole", ((2, "b"),)), "hinted_turn", {0, 1, 2}),
        (None, "hinted_turn", {0, 1, 2}),
    ):
        mask = span_mask(turns, [hint, Hint("s"), None], span)
        assert set(turns[0][mask[0]].tolist()) == expected
        assert torch.equal(mask[1:], sampled[1:])


# In the trainer


def told(*values):
    return {"trainer_feedback_func": lambda prompts, completions, rewards, **columns: [list(values)] * len(prompts)}


def reads(trainer, inputs, row):
    """What the teacher reads of one row, decoded."""
    parts = []
    for name in ("teacher_prompt", "teacher_completion"):
        parts.append(inputs[f"{name}_ids"][row][inputs[f"{name}_mask"][row].bool()])
    return trainer._tokenizer.decode(torch.cat(parts))


def with_logged(value):
    def reward(completions, log_extra, **kwargs):
        log_extra("feedback", [value] * len(completions))
        return [0.0] * len(completions)

    return reward


class Speaking(Room):
    feedback = ((1, "carry"), (2, "sum up"))


SOURCES = {
    "function": {"reward": tiny.never, **told((1, "carry"), (2, "sum up"))},
    "log_extra": {"reward": with_logged([[2, "sum up"], [1, "carry"]])},
    "environment": {"reward": tiny.never, "trainer_environment_factory": Speaking},
    "two": {"reward": with_logged([(1, "carry")]), **told((2, "sum up"))},
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_hint_stands_where_the_turn_begins(tmp_path, source):
    trainer = make(
        tmp_path, THREE, trainer_tools=[add], per_device_train_batch_size=4, gradient_accumulation_steps=2,
        turn_feedback_template="({feedback_raw})", **SOURCES[source],
    )  # fmt: skip
    rows = 0
    for inputs in tiny.micro_batches(trainer):
        own = inputs["completion_mask"].bool()
        for row in range(len(own)):
            prompt = trainer._tokenizer.decode(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()])
            between = [f"<|tool|>3<|end|><|user|>({text})<|end|><|assistant|>" for text in ("carry", "sum up")]
            first = FIRST + "<eos>"
            assert reads(trainer, inputs, row) == prompt + first + between[0] + first + between[1] + "done<eos>"
            kept = inputs["teacher_completion_ids"][row][inputs["teacher_positions"][row]]
            assert torch.equal(kept[own[row]], inputs["completion_ids"][row][own[row]])
            student = trainer._tokenizer.decode(inputs["completion_ids"][row][own[row]])
            assert student == first + observed("3") + first + observed("3") + "done<eos>"
            rows += 1
        assert torch.equal(trainer._active(inputs), trainer._loss_mask(inputs))
    assert rows == 8


def test_the_first_turns_text_stands_in_the_prompt(tmp_path):
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], **told((0, "start small"), (1, "carry")))
    (inputs,) = tiny.micro_batches(trainer)
    for row in range(8):
        prompt, rest = reads(trainer, inputs, row).split(FIRST, 1)
        assert "earlier attempt:\n\nstart small\n\n" in prompt and "carry" not in prompt
        assert "<|user|>carry<|end|><|assistant|>" in rest


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("kind", ["base", "trust_region"])
def test_the_teacher_scores_the_students_tokens_behind_the_hints(tmp_path, once, kind):
    """Against one plain forward over prompt, hints and answers."""
    scripts = [*THREE, ["at once$"], [FIRST + "$", "short$"]]
    judge = {
        "trainer_feedback_func": lambda prompts, completions, rewards, **columns: [
            [(len(turns) // 2, f"hint for {len(turns)}")] for turns in completions
        ]
    }
    trainer = make(tmp_path, scripts, tiny.never, trainer_tools=[add], teacher_model_kind=kind, **judge)
    (inputs,) = tiny.micro_batches(trainer)
    if not once:
        inputs.pop("teacher_hidden", None)
    active = trainer._active(inputs)
    head = trainer._teacher_pass.head(inputs, active)
    ids = torch.cat([inputs["teacher_prompt_ids"], inputs["teacher_completion_ids"]], dim=1)
    mask = torch.cat([inputs["teacher_prompt_mask"], inputs["teacher_completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
        ).logits
    start = inputs["teacher_prompt_ids"].size(1)
    expected = torch.stack(
        [logits[row, start + inputs["teacher_positions"][row, token] - 1] for row, token in active.nonzero().tolist()]
    )
    assert torch.allclose(head.logits(expected.size(1)), expected, atol=1e-4)
    assert active.any(dim=1).all()


@pytest.mark.parametrize("span", ["all", "from_hint", "hinted_turn"])
def test_the_span_decides_which_turns_are_distilled(tmp_path, span):
    options = told((1, "carry"))
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], distillation_span=span, **options)
    (inputs,) = tiny.micro_batches(trainer)
    turns = turn_index(trainer._loss_mask(inputs))
    expected = {"all": turns >= 0, "from_hint": turns >= 1, "hinted_turn": turns == 1}[span]
    active = trainer._active(inputs)
    assert torch.equal(active, expected) and inputs["active_tokens"] == expected.sum()
    loss, _ = tiny.gradient(trainer, inputs)
    trainer.log({})
    assert loss == pytest.approx(trainer.state.log_history[-1]["sdpo/divergence"], rel=1e-5)


@pytest.mark.parametrize("more", [{}, {"distillation_impl": "reference"}, {"pad_to_multiple_of": 16}], ids=str)
def test_micro_batches_add_up(tmp_path, more):
    """Rows with and without hints, shuffled, split and trimmed: the same gradient as in one batch."""
    scripts = [*THREE, ["at once$"], [FIRST + "$", "short$"]]
    judge = {
        "trainer_feedback_func": lambda prompts, completions, rewards, **columns: [
            [(1, "look")] if len(turns) > 1 else ("wrong" if i % 2 else None) for i, turns in enumerate(completions)
        ]
    }
    options = {"trainer_tools": [add], "distillation_span": "from_hint", **judge, **more}
    whole = make(tmp_path, scripts, tiny.never, **options)
    (inputs,) = tiny.micro_batches(whole)
    loss, gradient = tiny.gradient(whole, inputs)
    split = make(
        tmp_path, scripts, tiny.never, per_device_train_batch_size=2, gradient_accumulation_steps=4, **options
    )
    total, sums = 0.0, {}
    for inputs in tiny.micro_batches(split):
        part, grads = tiny.gradient(split, inputs)
        total += part
        sums = {name: sums.get(name, 0) + grad for name, grad in grads.items()}
    assert total == pytest.approx(loss, rel=1e-5)
    tiny.assert_near(sums, gradient)


def test_plain_texts_with_a_mask_of_their_own(tmp_path):
    """No template: the hint stands right in front of the turn."""
    text, mask = "abOBScd$", [1, 1, 0, 0, 0, 1, 1, 1]
    trainer = tiny.trainer(
        tmp_path, tiny.never, trainer_rollout_func=tiny.scripted([text], [mask]), **told((1, "{hint} "))
    )
    (inputs,) = tiny.micro_batches(trainer)
    for row in range(8):
        prompt = trainer._tokenizer.decode(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()])
        assert reads(trainer, inputs, row) == prompt + "abOBS{hint} cd<eos>"


def test_no_room_for_a_hint_is_an_error(tmp_path):
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], max_reprompt_len=80, **told((1, "x" * 500)))
    with pytest.raises(ValueError, match=r"prompt of row 0 leaves no room for its feedback per turn.*tokens are left"):
        tiny.micro_batches(trainer)


def test_long_hints_are_shortened_and_counted(tmp_path):
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], **told((1, "short"), (2, "y" * 3000)))
    length = int(tiny.micro_batches(trainer)[0]["prompt_mask"].sum(dim=1).max())
    trainer = make(
        tmp_path, THREE, tiny.never, trainer_tools=[add], max_reprompt_len=length + 120, max_steps=1,
        **told((1, "short"), (2, "y" * 3000)),
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    added = inputs["teacher_completion_mask"].sum(dim=1) - inputs["completion_mask"].sum(dim=1)
    assert (added <= 120).all() and (added > 60).all()
    assert "<|user|>short<|end|>" in reads(trainer, inputs, 0) and "y\n...\ny" in reads(trainer, inputs, 0)
    trainer.train()
    assert tiny.training_logs(trainer)[0]["sdpo/shortened_share"] == 1.0


def test_it_is_left_out_where_there_is_a_demonstration(tmp_path):
    options = {"trainer_tools": [add], **told((1, "carry"))}
    (inputs,) = tiny.micro_batches(make(tmp_path, THREE, tiny.always, **options))
    assert "teacher_positions" not in inputs
    both = make(tmp_path, THREE, tiny.always, environment_feedback_only_without_solution=False,
                distillation_span="hinted_turn", **options)  # fmt: skip
    (inputs,) = tiny.micro_batches(both)
    assert all("carry" in reads(both, inputs, row) and "solution" in reads(both, inputs, row) for row in range(8))
    assert torch.equal(both._active(inputs), both._loss_mask(inputs))  # a demonstration is about the whole


def test_the_table_shows_it(tmp_path):
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], log_completions=True, **told((1, "carry")))
    tiny.micro_batches(trainer)
    assert set(trainer._logs["extra"]["feedback"]) == {"[turn 1] carry"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (told((4, "late")), "feedback for turn 4 of rollout 0, which has 3 turns"),
        (told((-1, "early")), "`feedback_func` gave the turn -1 for rollout 0"),
    ],
)
def test_a_turn_that_does_not_exist(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny.micro_batches(make(tmp_path, THREE, tiny.never, trainer_tools=[add], **options))


def test_a_hint_for_the_turn_that_was_not_sampled_is_nothing(tmp_path):
    trainer = make(tmp_path, THREE, tiny.never, trainer_tools=[add], **told((3, "next time")))
    (inputs,) = tiny.micro_batches(trainer)
    assert not inputs["feedback_available"].any()


def test_a_turn_without_the_templates_header_is_an_error(tmp_path):
    text, mask = "abOBScd$", [1, 1, 0, 0, 0, 1, 1, 1]
    trainer = make(tmp_path, None, tiny.never, trainer_rollout_func=tiny.scripted([text], [mask]), **told((1, "x")))
    with pytest.raises(ValueError, match="Turn 1 of row 0 does not begin with the chat template's generation header"):
        tiny.micro_batches(trainer)


@pytest.mark.parametrize(
    ("template", "turn", "header"),
    [
        ("qwen2_5_training", "<|im_start|>user\nHINT<|im_end|>\n", "<|im_start|>assistant\n"),
        ("qwen3_training", "<|im_start|>user\nHINT<|im_end|>\n", "<|im_start|>assistant\n"),
        ("qwen3_5_think_training", "<|im_start|>user\nHINT<|im_end|>\n", "<|im_start|>assistant\n<think>\n"),
        ("llama3_1", "<|start_header_id|>user<|end_header_id|>\n\nHINT<|eot_id|>",
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("glm4moe_training", "<|user|>\nHINT", "<|assistant|>"),
        ("gptoss_training", "<|start|>user<|message|>HINT<|end|>", "<|start|>assistant"),
        ("gemma3_training", None, None),  # roles must alternate
        ("idefics3_training", None, None),  # takes typed blocks alone
    ],
)  # fmt: skip
def test_a_user_turn_in_known_templates(template, turn, header):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = resources.files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
    args = SimpleNamespace(turn_feedback_template="{feedback_raw}")
    writer = TurnHintWriter(
        SimpleNamespace(
            _tokenizer=tokenizer, chat_template=None, chat_template_kwargs={}, args=args,
            _rollouts=SimpleNamespace(prompts=[[]]),
        )
    )  # fmt: skip
    if turn is None:
        with pytest.raises(ValueError, match="no place for a user turn within a rollout"):
            writer._user_turn("HINT", 0)
    else:
        assert tokenizer.decode(writer._user_turn("HINT", 0)) == turn
        assert tokenizer.decode(writer._header(0)) == header


def test_a_template_that_refuses_it_is_an_error(tmp_path):
    tokenizer = tiny.tool_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.first and m['role'] == 'user' %}"
        "{{ raise_exception('one question only') }}{% endif %}{% endfor %}"
    ) + tokenizer.chat_template
    trainer = make(
        tmp_path, THREE, tiny.never, trainer_tools=[add], trainer_processing_class=tokenizer, **told((1, "x"))
    )
    with pytest.raises(ValueError, match=r"no place for a user turn within a rollout \(one question only\)"):
        tiny.micro_batches(trainer)


def test_a_rollout_under_qwen3s_own_template(tmp_path):
    """TRL's training template, its parser, its suffixes: student and teacher read what they should."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = resources.files("trl").joinpath("chat_templates/qwen3.jinja").read_text()
    say = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "add", "arg}\n</tool_call>'
    trainer = make(
        tmp_path, [[f"{say}$", f"{broken}$", "done$"]], tiny.never, trainer_tools=[add], max_steps=1,
        model=tiny.build_model(vocab_size=112, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id),
        trainer_processing_class=tokenizer, max_completion_length=900, **told((1, "carry"), (2, "JSON!")),
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    assert "<tool_call>" in str(trainer._tokenizer.response_template)
    header = "<|im_start|>assistant\n"
    for row in range(8):
        active = trainer._active(inputs)[row]
        own = [trainer._tokenizer.decode(ids) for ids in turns_of(inputs["completion_ids"][row], active)]
        assert own == [f"{say}<|im_end|>", f"{broken}<|im_end|>", "done<|im_end|>"]
        text = reads(trainer, inputs, row)
        assert f"<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>user\ncarry<|im_end|>\n{header}" in text
        assert "could not be read" in text and f"<|im_start|>user\nJSON!<|im_end|>\n{header}done" in text
    trainer.train()


def turns_of(ids, active):
    index = turn_index(active[None])[0]
    return [ids[index == turn] for turn in range(int(index.max()) + 1)]


def chosen(hint, **options):
    """What the teacher of the first row reads if a subclass chooses this hint, and the trainer and its inputs."""

    def build(folder):
        trainer = make(folder, THREE, tiny.never, trainer_tools=[add], **options)
        trainer.choose_hints = lambda hints, rollouts, success: [hint] * len(hints)
        (inputs,) = tiny.micro_batches(trainer)
        return trainer, inputs

    return build


def test_texts_on_one_turn_are_joined_and_the_first_turns_stand_in_the_prompt(tmp_path):
    """From a subclass, as from the other sources."""
    hint = Hint(turns=((1, "carry"), (0, "start small"), (1, "the one")), hinted=(1, 0))
    trainer, inputs = chosen(hint, distillation_span="hinted_turn")(tmp_path)
    prompt, rest = reads(trainer, inputs, 0).split(FIRST, 1)
    assert "earlier attempt:\n\nstart small\n\n" in prompt
    assert "<|user|>carry\n\nthe one<|end|><|assistant|>" in rest
    turns = turn_index(trainer._loss_mask(inputs))
    assert torch.equal(trainer._active(inputs), (turns == 0) | (turns == 1))


def test_a_hint_for_a_turn_of_a_masked_rollout_is_nothing(tmp_path):
    trainer = make(
        tmp_path, [[FIRST + "$", "do"], [FIRST + "$", "done$"]], tiny.never, trainer_tools=[add],
        mask_truncated_completions=True, distillation_span="hinted_turn",
    )  # fmt: skip
    trainer.choose_hints = lambda hints, rollouts, success: [Hint(turns=((1, "carry"),), hinted=(1,))] * len(hints)
    (inputs,) = tiny.micro_batches(trainer)
    active = trainer._active(inputs)
    assert active.any(dim=1).sum() == 4 and active.sum() == 4 * len("doneE")
