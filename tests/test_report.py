"""The heat map: its values against plain forwards, its three ways in, its page against what models may write."""

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from sdpo_trl.divergence import DivergenceSpec, entropy, token_divergence
from sdpo_trl.report import (
    Candidate,
    Heatmap,
    Rescorer,
    RolloutView,
    TokenHeatmapCallback,
    TokenValues,
    TokenView,
    read_table,
    scoring_config,
    table_heatmap,
)
from sdpo_trl.report.__main__ import main
from sdpo_trl.report.page import LEVELS, level, scale_of, visible
from sdpo_trl.report.trackers import log_page
from sdpo_trl.report.values import TokenTexts

REPORT = Path(__file__).parent.parent / "sdpo_trl" / "report"
TEMPLATES = REPORT / "templates"
NASTY = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "\"'><svg onload=window.hacked=1>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202eltr\u2066 \u200f \u200b \ufeff",
    "\x00\x07\x1b[31m\x7f\x85\r",
    "\ud800 and \udfff",
    "\u2028\u2029\ue000\U000e0041\ufffe",
    "]]>&lt;script&gt;",
]


class Keeping(TokenHeatmapCallback):
    """Also keeps the records."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen: list[Heatmap] = []

    def _heatmap(self, step):
        self.seen.append(super()._heatmap(step))
        return self.seen[-1]


def page_data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def plain_logits(model, context: list[int], answer: list[int]) -> torch.Tensor:
    """What a plain forward says about each token of the answer, `(T, V)`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *answer]])).logits[0].double()
    return logits[len(context) - 1 : -1]


def assert_truth(rollout: RolloutView, prompt: str, model, teacher, spec: DivergenceSpec, temperature=1.0, tol=1e-9):
    """Every value of a scored rollout against two plain forwards."""
    tokenizer = tiny.build_tokenizer()

    def encoded(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = [token.id for token in rollout.tokens]
    student = (plain_logits(model, encoded(prompt), ids) / temperature).log_softmax(-1)
    other = (plain_logits(teacher, encoded(rollout.teacher_prompt), ids) / temperature).log_softmax(-1)
    wanted = token_divergence(student, other, torch.tensor(ids), spec)
    checked = 0
    for t, token in enumerate(rollout.tokens):
        if token.role != "scored":
            assert token.values is None
            continue
        v, checked = token.values, checked + 1
        pairs = [
            (v.divergence, wanted[t]), (v.log_ratio, other[t, token.id] - student[t, token.id]),
            (v.student_log_prob, student[t, token.id]), (v.teacher_log_prob, other[t, token.id]),
            (v.student_entropy, entropy(student[t])), (v.teacher_entropy, entropy(other[t])),
        ]  # fmt: skip
        for got, truth in pairs:
            assert abs(got - float(truth)) <= tol, (t, got, float(truth))
        for top, log_probs in ((v.student_top, student[t]), (v.teacher_top, other[t])):
            best = log_probs.exp().topk(len(top))
            assert [c.id for c in top] == best.indices.tolist()
            assert max(abs(c.probability - p) for c, p in zip(top, best.values.tolist(), strict=True)) <= tol
            assert all(c.text == tokenizer.decode([c.id]) for c in top)
    assert checked


def rescorer(model=None, teacher=None, **options) -> Rescorer:
    kind = {} if teacher is None else {"teacher_model_kind": "ema"}
    args = scoring_config(use_cpu=True, bf16=False, max_completion_length=12, **kind, **options)
    model = tiny.build_model().double() if model is None else model
    return Rescorer(model, teacher_model=teacher, processing_class=tiny.build_tokenizer(), args=args, topk=5)


# Values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distillation_alpha": 1.0, "temperature": 0.7},
        {"distillation_alpha": 0.0},
        {"distillation_mode": "topk_logits", "distillation_topk": 3},
    ],
)
def test_typed_values_equal_plain_forwards(options):
    scorer = rescorer(**options)
    heatmap = scorer.heatmap("2+3=", feedback="it is 5 {x}", solution="5", answer="2+3 is 6")
    rollout = heatmap.rollouts[0]
    truth = tiny.build_model().double()
    assert_truth(
        rollout, heatmap.prompt, truth, truth, scorer.trainer.args.divergence, options.get("temperature", 1.0)
    )
    assert heatmap.prompt == "<|user|>2+3=<|end|><|assistant|>"
    assert "solution:\n\n5\n" in rollout.teacher_prompt and "it is 5 {x}" in rollout.teacher_prompt
    assert rollout.feedback == "it is 5 {x}" and rollout.solution == "5"
    # The page rounds to seven digits, and loses nothing else.
    rows = page_data(heatmap.html())["rollouts"][0]
    for row, token in zip(rows, rollout.tokens, strict=True):
        assert row[:2] == [token.id, "scored"]
        assert row[2] == pytest.approx(token.values.divergence, rel=1e-6)
        assert row[3] == pytest.approx(token.values.log_ratio, rel=1e-6)
        assert [i for i, _ in row[8]] == [c.id for c in token.values.student_top]
        assert [p for _, p in row[9]] == pytest.approx([c.probability for c in token.values.teacher_top], rel=1e-6)


def test_external_teacher_and_sampled_answer():
    other = tiny.build_model(seed=7).double()
    scorer = rescorer(teacher=other)
    heatmap = scorer.heatmap("hello", feedback="no")
    rollout = heatmap.rollouts[0]
    assert rollout.name == "Sampled answer" and 1 <= len(rollout.tokens) <= 12
    assert heatmap.settings["Teacher"] == "an external model"
    assert_truth(
        rollout, heatmap.prompt, tiny.build_model().double(), tiny.build_model(seed=7).double(), DivergenceSpec()
    )


def test_sampled_token_divergence_is_minus_the_gap():
    scorer = rescorer(distillation_mode="sampled_token", distillation_alpha=1.0)
    tokens = scorer.heatmap("a", feedback="b", answer="xyz").rollouts[0].tokens
    assert all(token.values.divergence == -token.values.log_ratio for token in tokens)


def test_long_answers_are_chunked(monkeypatch):
    whole = rescorer().heatmap("a", feedback="b", answer="some longer answer")
    monkeypatch.setattr("sdpo_trl.report.values._CHUNK_ENTRIES", 104 * 5)
    assert rescorer().heatmap("a", feedback="b", answer="some longer answer").rollouts[0].tokens[0].id
    parts = rescorer().heatmap("a", feedback="b", answer="some longer answer")
    for one, two in zip(whole.rollouts[0].tokens, parts.rollouts[0].tokens, strict=True):
        assert one.values.divergence == pytest.approx(two.values.divergence, abs=1e-12)


def test_scoring_changes_no_weight():
    model = tiny.build_model().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rescorer(model).heatmap("a", feedback="b", answer="xyz")
    tiny.assert_equal(model.state_dict(), before)


def test_an_empty_answer_and_no_hint_are_refused():
    scorer = rescorer()
    with pytest.raises(ValueError, match="answer is empty"):
        scorer.heatmap("a", feedback="b", answer="")
    with pytest.raises(ValueError, match="give `feedback` or a `solution`"):
        scorer.heatmap("a", answer="b")


# In training


def test_first_step_equals_plain_forwards(tmp_path):
    # transformers' eager attention is NaN beside left padding in float64.
    look = Keeping(every=2, rollouts=4, topk=5)
    answers = ["right$", "wrong", "badly$", "odd"]
    masks = [[1] * 6, [1, 1, 0, 0, 1], [1] * 6, [1, 1, 1]]
    trainer = tiny.trainer(
        tmp_path,
        reward=tiny.telling("no <i>", reward=tiny.never),
        model=tiny.build_model(attn_implementation="sdpa").double(),
        data=tiny.prompts(chat=True),
        max_steps=3,
        max_completion_length=8,
        trainer_callbacks=[look],
        trainer_rollout_func=tiny.scripted(answers, masks),
    )
    trainer.train()
    assert sorted(p.name for p in (tmp_path / "heatmaps").iterdir()) == [
        "index.jsonl", "step_000001.html", "step_000003.html",
    ]  # fmt: skip
    heatmap = look.seen[0]
    assert heatmap.settings["Step"] == "1" and heatmap.settings["Teacher"] == "ema"
    assert len(heatmap.rollouts) == 4
    truth = tiny.build_model(attn_implementation="sdpa").double()
    texts = {"".join(token.text for token in rollout.tokens): rollout for rollout in heatmap.rollouts}
    assert set(texts) == {"right<eos>", "wrong", "badly<eos>", "odd"}
    assert [t.role for t in texts["wrong"].tokens] == ["scored", "scored", "context", "context", "scored"]
    for rollout in heatmap.rollouts:
        assert_truth(
            rollout, heatmap.prompt, truth, truth, DivergenceSpec(), tol=2e-7
        )  # padded, and Llama's softmax is float32
        assert rollout.reward == 0.0 and rollout.feedback.startswith("no <i> ")
        assert rollout.feedback in rollout.teacher_prompt
    # Later steps show what the weights were then.
    assert look.seen[1].settings["Step"] == "3"
    assert look.seen[1].rollouts[0].tokens[0].values != heatmap.rollouts[0].tokens[0].values


def run(folder, callbacks, **options):
    torch.manual_seed(1)
    trainer = tiny.trainer(
        folder,
        reward=tiny.telling(reward=tiny.even_length),
        model=tiny.build_model(attention_dropout=0.1),
        data=tiny.prompts(16),
        max_steps=4,
        trainer_callbacks=callbacks,
        **options,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "steps_per_generation": 2, "distillation_weight": 0.5},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "teacher_model_kind": "trust_region"},
        {"trainer_peft_config": tiny.lora(), "gradient_accumulation_steps": 4, "distillation_impl": "reference"},
    ],
)
def test_training_is_bit_identical(tmp_path, options):
    look = Keeping(every=1, rollouts=3)
    with_it, without = run(tmp_path / "a", [look], **options), run(tmp_path / "b", [], **options)
    assert len(look.seen) >= 3 and all(1 <= len(heatmap.rollouts) <= 3 for heatmap in look.seen)
    tiny.assert_equal(tiny.trained(with_it.model), tiny.trained(without.model))
    assert tiny.training_logs(with_it) == tiny.training_logs(without)
    assert with_it.model.training == without.model.training


def test_rows_keep_their_own_rewards(tmp_path):
    """Shuffled rows find their reward, feedback and prompt again."""

    def reward(completions, log_extra, **columns):
        log_extra("feedback", [f"length {len(c)}" for c in completions])
        return [len(c) / 100 for c in completions]

    look = Keeping(every=1, rollouts=4)
    answers = ["a", "bb", "ccc", "dddd", "eeeee", "f" * 6, "g" * 7, "h" * 8]
    tiny.trainer(
        tmp_path,
        reward=reward,
        trainer_callbacks=[look],
        trainer_rollout_func=tiny.scripted(answers),
        gradient_accumulation_steps=4,
        per_device_train_batch_size=2,
        max_completion_length=10,
    ).train()
    assert len(look.seen) == 2
    for heatmap in look.seen:
        assert len(heatmap.rollouts) == 4
        for rollout in heatmap.rollouts:
            assert rollout.reward == pytest.approx(len(rollout.tokens) / 100)
            assert rollout.rewards == {"reward": pytest.approx(len(rollout.tokens) / 100)}
            assert rollout.feedback == f"length {len(rollout.tokens)}"
            assert all(token.role == "scored" for token in rollout.tokens)


def test_siblings_without_feedback_are_shown_without_values(tmp_path):
    def reward(completions, log_extra, **columns):
        log_extra("feedback", ["no" if len(c) > 2 else None for c in completions])
        return [0.0] * len(completions)

    look = Keeping(every=1, rollouts=4)
    rollout_func = tiny.scripted(["a", "bb", "ccc", "dddd"])
    tiny.trainer(tmp_path, reward=reward, trainer_callbacks=[look], trainer_rollout_func=rollout_func).train()
    lengths = {len(rollout.tokens): rollout for rollout in look.seen[0].rollouts}
    assert lengths.keys() == {1, 2, 3, 4}
    for length, rollout in lengths.items():
        assert all(token.role == ("scored" if length > 2 else "unscored") for token in rollout.tokens)
        assert (rollout.teacher_prompt is not None) == (length > 2)
    assert "had nothing to read" in look.seen[0].notes[0]


def test_feedback_on_single_turns_is_shown(tmp_path):
    def feedback(prompts, completions, rewards, **columns):
        return [[(0, "begin"), (1, "carry")]] * len(prompts)

    look = Keeping(every=1)
    tiny.trainer(
        tmp_path, tiny.never, trainer_callbacks=[look], trainer_feedback_func=feedback, log_completions=True,
        max_steps=1, trainer_rollout_func=tiny.scripted(["ab cd"], [[1, 1, 0, 1, 1]]),
    ).train()  # fmt: skip
    (rollout,) = look.seen[0].rollouts
    assert rollout.feedback == "[turn 0] begin\n\n[turn 1] carry"
    again = table_heatmap(tmp_path / "completions" / "completions_00001.parquet", rescorer(tiny.build_model()))
    assert again.rollouts[0].feedback == rollout.feedback and "single turns" in again.notes[1]


def test_nothing_to_show_waits_for_a_step_that_has_something(tmp_path):
    steps = []

    def reward(completions, log_extra, **columns):
        steps.append(1)
        log_extra("feedback", [None if len(steps) < 2 else "no"] * len(completions))
        return [0.0] * len(completions)

    look = Keeping(every=3)
    tiny.trainer(tmp_path, reward=reward, trainer_callbacks=[look], max_steps=4).train()
    assert [heatmap.settings["Step"] for heatmap in look.seen] == ["2", "4"]


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    look = Keeping(folder=tmp_path / "file")
    trainer = tiny.trainer(tmp_path, reward=tiny.telling(), trainer_callbacks=[look])
    trainer.train()
    assert trainer.state.global_step == 2 and "was not written" in caplog.text


@pytest.mark.parametrize("name", ["every", "rollouts", "topk"])
def test_callback_refuses_numbers_below_one(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        TokenHeatmapCallback(**{name: 0})


def test_callback_refuses_a_trainer_without_a_teacher(tmp_path):
    trainer = tiny.trainer(tmp_path, trainer_callbacks=[TokenHeatmapCallback()], distillation_weight=0.0)
    with pytest.raises(ValueError, match="no teacher to look at"):
        trainer.train()
    grpo = GRPOTrainer(
        tiny.build_model(),
        tiny.never,
        GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        tiny.prompts(),
        processing_class=tiny.build_tokenizer(),
        callbacks=[TokenHeatmapCallback()],
    )
    with pytest.raises(TypeError, match="got GRPOConfig"):
        grpo.train()


# Completions tables


def test_a_table_scored_again_equals_the_step_that_wrote_it(tmp_path):
    look = Keeping(every=1, rollouts=4)
    trainer = tiny.trainer(
        tmp_path,
        reward=tiny.telling(),
        model=tiny.build_model().double(),
        data=tiny.prompts(chat=True),
        max_steps=1,
        log_completions=True,
        trainer_callbacks=[look],
        trainer_rollout_func=tiny.scripted(["right", "wrong", "badly", "odd"]),
    )
    trainer.train()
    table = tmp_path / "completions" / "completions_00001.parquet"
    assert len(read_table(table)) == 8
    scorer = rescorer()
    maps = [table_heatmap(table, scorer, prompt=i) for i in (0, 1)]
    heatmap = next(m for m in maps if m.prompt == look.seen[0].prompt)
    assert [r.feedback for r in heatmap.rollouts] == [r.feedback for r in look.seen[0].rollouts]
    assert [r.reward for r in heatmap.rollouts] == [0.0] * 4
    for again, then in zip(heatmap.rollouts, look.seen[0].rollouts, strict=True):
        assert again.teacher_prompt == then.teacher_prompt
        assert [t.id for t in again.tokens] == [t.id for t in then.tokens]
        for one, two in zip(again.tokens, then.tokens, strict=True):
            assert one.values.divergence == pytest.approx(two.values.divergence, abs=2e-7)
    assert len(table_heatmap(table, scorer, rollouts=2).rollouts) == 2
    with pytest.raises(IndexError, match="has 2 prompts"):
        table_heatmap(table, scorer, prompt=2)


def test_tool_messages_of_a_table_are_context():
    conversation = [{"role": "user", "content": "q"}]
    completion = [
        {"role": "assistant", "content": "ask"},
        {"role": "tool", "content": "reply"},
        {"role": "assistant", "content": "so"},
    ]
    frame = pd.DataFrame({"prompt": [conversation], "completion": [completion], "feedback": ["no"], "r": [0.5]})
    heatmap = table_heatmap(frame, rescorer())
    tokens = heatmap.rollouts[0].tokens
    assert "".join(t.text for t in tokens if t.role == "context") == "<|tool|>reply<|end|><|assistant|>"
    assert "".join(t.text for t in tokens if t.role == "scored").startswith("<|assistant|>ask<|end|>") or (
        "".join(t.text for t in tokens if t.role == "scored") == "ask<|end|>so<|end|>"
    )
    assert heatmap.rollouts[0].rewards == {"r": 0.5}


def test_a_table_without_its_columns_is_refused():
    with pytest.raises(ValueError, match="no column `completion`"):
        read_table(pd.DataFrame({"prompt": ["a"]}))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_empty_cells_of_a_table_are_nothing(missing):
    full = {"step": 3, "prompt": "a", "completion": "b", "feedback": "no", "advantage": 0.5, "r": 1.0}
    for name in full:
        rows = read_table(pd.DataFrame([full, {**full, name: missing}]))
        assert rows[0].step == 3 and rows[0].advantage == 0.5
        for field, value in (
            ("step", None),
            ("prompt", ""),
            ("completion", ""),
            ("feedback", None),
            ("advantage", None),
        ):
            assert getattr(rows[1], field) == (value if field == name else full[field])
    frame = pd.DataFrame([full, {**full, "completion": missing, "step": missing, "advantage": missing}])
    assert len(table_heatmap(frame, rescorer()).rollouts) == 1


def test_numbers_that_show_nothing_are_refused():
    frame = pd.DataFrame({"prompt": ["a"], "completion": ["b"], "feedback": ["no"]})
    for number in (0, -1):
        with pytest.raises(ValueError, match="`rollouts` must be at least 1"):
            table_heatmap(frame, rescorer(), rollouts=number)
        with pytest.raises(ValueError, match="`topk` must be at least 1"):
            Rescorer(None, topk=number)


def test_half_a_character_is_written_out():
    """As the command line hands over bytes that are no text."""
    heatmap = rescorer().heatmap("a\udcff", feedback="b\udcff", solution="c\udcff", answer="d\udcff")
    assert "a\\udcff" in heatmap.prompt and heatmap.rollouts[0].feedback == "b\\udcff"
    assert "".join(token.text for token in heatmap.rollouts[0].tokens) == "d\\udcff"


# Command line


def test_command_line(tmp_path, capsys):
    tiny.build_model().save_pretrained(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "map.html"
    command = [sys.executable, "-m", "sdpo_trl.report", "--model", str(tmp_path / "model"), "--out", str(out)]
    options = ["--prompt", "2+3=", "--feedback", "<b>no</b>", "--answer", "6", "--answer", "7"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(str(out))
    page = out.read_text(encoding="utf-8")
    assert "&lt;b&gt;no&lt;/b&gt;" in page and "<b>no</b>" not in page
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double()
    tokenizer = tiny.build_tokenizer()
    ids = tokenizer("<|user|>2+3=<|end|><|assistant|>")["input_ids"]
    for rows, answer in zip(page_data(page)["rollouts"], "67", strict=True):
        token = tokenizer(answer)["input_ids"][0]
        truth = plain_logits(model, ids, [token]).log_softmax(-1)[0, token]
        assert rows[0][4] == pytest.approx(float(truth), abs=1e-5)
    for wrong in (
        ["--prompt", "a"],
        [],
        ["--prompt", "a", "--feedback", "b", "--table", "t"],
        ["--table", "t", "--answer", "b"],
    ):
        with pytest.raises(SystemExit) as error:
            main(["--model", "m", *wrong])
        assert error.value.code == 2
    assert "give either --prompt or --table" in capsys.readouterr().err


def test_the_folder_of_an_adapter(tmp_path):
    tiny.build_model().save_pretrained(tmp_path / "base")
    tiny.build_tokenizer().save_pretrained(tmp_path / "base")
    trainer = tiny.trainer(
        tmp_path / "run",
        model=str(tmp_path / "base"),
        reward=tiny.telling(),
        trainer_peft_config=tiny.lora(),
        learning_rate=0.1,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    folder = str(tmp_path / "run" / "checkpoint-2")
    options = ["--prompt", "hello", "--feedback", "no", "--answer", "xyz", "--out", str(tmp_path / "map.html")]
    thinking = ["--chat_template_kwargs", '{"think": true}']
    heatmap = main(["--model", folder, *options, *thinking])
    assert heatmap.prompt == "<|user|>hello<|end|><|assistant|><think>"
    tokenizer = tiny.build_tokenizer()
    ids, answer = (tokenizer(text)["input_ids"] for text in (heatmap.prompt, "xyz"))
    trained, plain = (
        plain_logits(model.eval(), ids, answer).log_softmax(-1).gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        for model in (trainer.model, AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    )
    shown = [token.values.student_log_prob for token in heatmap.rollouts[0].tokens]
    assert shown == pytest.approx(trained.tolist(), abs=1e-4)
    assert (trained - plain).abs().max() > 0.01


# The page


def nasty_heatmap() -> Heatmap:
    """One rollout whose tokens, texts and names are all nasty."""
    top = tuple(Candidate(100 + i, text, 0.1) for i, text in enumerate(NASTY))
    values = TokenValues(0.5, float("nan"), -1.0, float("-inf"), 1.0, 2.0, top, top)
    tokens = [TokenView(i, text, "scored", values) for i, text in enumerate(NASTY)]
    tokens += [TokenView(50 + i, text, "context") for i, text in enumerate(NASTY)]
    text = "\n".join(NASTY)
    rollout = RolloutView(text, tuple(tokens), text, text, text, float("nan"), {text: 1.0, text + "2": None}, 0.5)
    return Heatmap(text, text, (rollout, rollout), {text: text}, (text,))


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_what_models_write_is_harmless():
    page = nasty_heatmap().html()
    page.encode("utf-8")  # no half surrogate is left
    parsed = _Tags()
    parsed.feed(page)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("script") == 2 and not {"img", "svg", "iframe", "link", "object"} & set(names)
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    assert not any(name in ("src", "href") for _, attrs in parsed.tags for name in attrs)
    assert "<script>window" not in page and "<!--<" not in page and "49" not in page_data(page)["texts"].values()
    raw = set(page) - set("\n")
    assert not [c for c in raw if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066\u200f\u200b\ufeff\u2028"]
    for shown in ("⟨U+202E⟩", "␀", "␛", "␡", "⟨U+D800⟩", "⟨U+2028⟩", "⟨U+FEFF⟩", "␍", "⟨U+0085⟩", "⟨U+E0041⟩"):
        assert shown in html.unescape(page), shown
    assert page_data(page)["rollouts"][0][0][3] == "nan" and page_data(page)["rollouts"][0][0][5] == "-inf"


def test_policy_allows_the_page_alone():
    page = nasty_heatmap().html()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    script = re.search(r"<script>(.*)</script>\n</body>", page, re.S)[1]
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"(https?:)?//[a-z]", style + script)


def test_visible_leaves_ordinary_text_alone():
    ordinary = "Zoë 数学 שלום 😀 \\frac{1}{2}\n\tx — «é»"
    assert visible(ordinary) == ordinary


def test_record_survives_json():
    heatmap = nasty_heatmap()
    again = Heatmap.from_json(heatmap.to_json())
    assert again.to_json() == heatmap.to_json() and again.to_json().isascii()
    plain = rescorer().heatmap("a", feedback="b", answer="xyz")
    assert Heatmap.from_json(plain.to_json()) == plain


def test_notebook_frame_holds_the_whole_page():
    heatmap = replace(nasty_heatmap(), title="a\"b'<")
    framed = heatmap._repr_html_()
    parsed = _Tags()
    parsed.feed(framed)
    assert [tag for tag, _ in parsed.tags] == ["iframe"]
    assert parsed.tags[0][1]["srcdoc"] == heatmap.html() and parsed.tags[0][1]["sandbox"] == "allow-scripts"


def test_levels_follow_the_values():
    scale = scale_of([0.01 * i for i in range(101)] + [float("nan")])
    assert scale == pytest.approx(0.98)
    assert [level(x, 1.0) for x in (0.0, 0.009, 0.01, -0.5, 1.0, 1e9, float("nan"))] == [0, 0, 1, 5, 7, 7, 0]
    sizes = [level(x / 1000, 1.0) for x in range(1001)]
    assert sizes == sorted(sizes) and set(sizes) == set(range(LEVELS + 1))
    assert scale_of([]) == 1.0 and scale_of([0.0, 0.0]) == 1.0


def test_text_is_readable_on_every_colour():
    """WCAG: 4.5 for text, and the marks that stand for colour are told from it."""
    css = (TEMPLATES / "heatmap.css").read_text(encoding="utf-8")

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, two):
        low, high = sorted([luminance(one), luminance(two)])
        return (high + 0.05) / (low + 0.05)

    schemes = re.findall(r":root \{(.*?)\}", css, re.S)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for kind in ("up", "down", "d"):
            for k in range(1, LEVELS + 1):
                assert contrast(colours["ink"], colours[f"{kind}{k}"]) >= 4.5, (kind, k)
                assert contrast(colours[f"mark-{kind}"], colours[f"{kind}{k}"]) >= 3.0, (kind, k)
        assert contrast(colours["soft"], colours["page"]) >= 4.5 and contrast(colours["soft"], colours["card"]) >= 4.5
        assert contrast(colours["tool"], colours["tool-ink"]) >= 4.5


def test_token_texts_keep_the_space_before_a_word():
    class Metaspace:
        """Drops the space at the beginning, as SentencePiece does; ids 3 and 4 are the halves of one character."""

        words = ("a", "▁a", "▁cat", "<0xC3>", "<0xA9>", "")
        all_special_ids = ()

        def __len__(self):
            return len(self.words)

        def batch_decode(self, rows, **options):
            texts = ["".join("�" if self.words[i].startswith("<0") else self.words[i] for i in row) for row in rows]
            return [text.replace("▁", " ").removeprefix(" ") for text in texts]

        def convert_ids_to_tokens(self, index):
            return self.words[index]

    texts = TokenTexts(Metaspace()).of([0, 2, 3, 4, 5])
    assert texts == {0: "a", 2: " cat", 3: "<0xC3>", 4: "<0xA9>", 5: "[id 5]"}


def test_the_tokens_of_an_image_are_counted():
    tokenizer = tiny.build_tokenizer()
    ids = tokenizer("look<|tool|><|tool|>")["input_ids"]
    texts, tool = TokenTexts(tokenizer), ids[-1]
    assert texts.text(ids) == "look<|tool|><|tool|>"
    assert texts.text([*ids[:4], *[tool] * 300, *ids[:2]]) == "look<|tool|>(\N{MULTIPLICATION SIGN} 300)lo"
    assert texts.text(tokenizer("a" + "b" * 50)["input_ids"]) == "a" + "b" * 50


def test_a_page_of_2000_tokens_is_small(tmp_path):
    tokens = rescorer().heatmap("a", feedback="b", answer="word " * 40).rollouts[0].tokens * 10
    path = Heatmap("long", "p", (RolloutView("one", tokens),)).save(tmp_path / "sub" / "long.html")
    assert path.stat().st_size < 1.5e6 and len(tokens) == 2000


# Trackers


def test_the_page_goes_to_the_trackers_that_are_on(monkeypatch, tmp_path):
    logged = []

    def tracker(name, **extra):
        def page(data, inject):
            return (name, data, inject)

        return SimpleNamespace(Html=page, log=lambda entry: logged.append(entry), **extra)

    monkeypatch.setitem(sys.modules, "trackio", tracker("trackio"))
    monkeypatch.setitem(sys.modules, "wandb", tracker("wandb", run=None))
    assert log_page("<p>", []) == [] and log_page("<p>", ["tensorboard"]) == []
    assert log_page("<p>", ["trackio", "wandb"]) == ["trackio"]
    monkeypatch.setitem(sys.modules, "wandb", tracker("wandb", run=object()))
    assert log_page("<p>", ["wandb"]) == ["wandb"]
    assert logged == [{"sdpo/heatmap": ("trackio", "<p>", False)}, {"sdpo/heatmap": ("wandb", "<p>", False)}]

    pages = []
    monkeypatch.setattr("sdpo_trl.report.callback.log_page", lambda page, report_to: pages.append((page, report_to)))
    tiny.trainer(tmp_path, reward=tiny.telling(), trainer_callbacks=[TokenHeatmapCallback()], max_steps=1).train()
    assert pages == [((tmp_path / "heatmaps" / "step_000001.html").read_text(encoding="utf-8"), [])]


# Architecture


def test_the_core_does_not_import_the_report():
    core = [path for path in REPORT.parent.rglob("*.py") if REPORT not in path.parents]
    assert len(core) > 20
    assert not [p.name for p in core if re.search(r"import.*\breport\b|from .*\breport\b", p.read_text())]


def test_a_tokenizer_that_cannot_encode_a_letter_has_texts_all_the_same():
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "X": 2, "+": 3}))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    assert TokenTexts(tokenizer).of([1, 2, 3]) == {1: "<eos>", 2: "X", 3: "+"}
