"""The teacher's prompt as a pure function of messages and texts."""

import copy
import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from sdpo_trl.reprompt import (
    Hint,
    Templates,
    completion_text,
    fill,
    message_text,
    reprompt_text,
    shorten,
    strip_thinking,
    teacher_prompt,
)

TRICKY = [
    r"\frac{1}{2} \1 \g<0> \\",
    "{x} {prompt} {solution} {feedback} {feedback_raw} {successful_previous_attempt}",
    '{"error": {"line": 3, "text": "{}"}}',
    "{{double}} }{ %s %(a)s $x ${y}",
    "C1=CC=C(C=C1)C(=O)O [N+](=O)[O-]\n\ttab",
    "naïve 数学 🙂 \x00",
]
tricky = pytest.mark.parametrize("text", TRICKY)
SYSTEM = {"role": "system", "content": "Be brief."}
IMAGE = {"type": "image", "image": "an image"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


# Substitution


@tricky
def test_fill_is_literal(text):
    assert fill("a{one}b{two}{one}", one=text, two="2") == "a" + text + "b2" + text
    assert fill("{other} { one } {{two}}", one=text, two="T") == "{other} { one } {T}"


@tricky
def test_default_templates_pass_any_text_unchanged(text):
    """The paper's Table 2, put together by hand."""
    solution = "\nCorrect solution:\n\n" + text + "\n\n"
    feedback = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n" + text + "\n\n"
    closing = "\n\nCorrectly solve the original question.\n"
    assert reprompt_text(text, Hint(text, text), Templates()) == text + solution + feedback + closing
    assert reprompt_text(text, Hint(solution=text), Templates()) == text + solution + closing
    assert reprompt_text(text, Hint(feedback=text), Templates()) == text + feedback + closing
    assert reprompt_text(text, Hint(), Templates()) == text + closing


@tricky
def test_user_templates_may_hold_braces_and_json(text):
    templates = Templates(
        reprompt='{"q": "{prompt}"} \\frac{{a}}{b} {solution}|{feedback} {"answer": {}}',
        solution="\\boxed{{successful_previous_attempt}}",
        feedback='{"feedback": "{feedback_raw}", "n": {"k": 1}}',
    )
    expected = (
        '{"q": "' + text + '"} \\frac{{a}}{b} \\boxed{' + text + '}|{"feedback": "' + text + '", "n": {"k": 1}} '
        '{"answer": {}}'
    )
    assert reprompt_text(text, Hint(text, text), templates) == expected


@pytest.mark.parametrize(
    ("option", "template", "name", "slot"),
    [
        ("reprompt", "{solution}{feedback}", "reprompt_template", "{prompt}"),
        ("reprompt", "{prompt}{feedback}", "reprompt_template", "{solution}"),
        ("reprompt", "{prompt}{solution}{ feedback }", "reprompt_template", "{feedback}"),
        ("solution", "{solution}", "solution_template", "{successful_previous_attempt}"),
        ("feedback", "{feedback}", "feedback_template", "{feedback_raw}"),
        ("feedback", "", "feedback_template", "{feedback_raw}"),
    ],
)
def test_templates_without_a_slot_are_refused(option, template, name, slot):
    with pytest.raises(ValueError) as caught:
        Templates(**{option: template})
    assert name in str(caught.value) and slot in str(caught.value) and repr(template) in str(caught.value)


# Placement


HINT = Hint("x+1", "f(2)=4")
SHORT = Templates("Q<{prompt}>{solution}{feedback}", "S<{successful_previous_attempt}>", "F<{feedback_raw}>")


def test_plain_prompts():
    assert teacher_prompt("why?", HINT, SHORT) == "Q<why?>S<x+1>F<f(2)=4>"
    assert teacher_prompt("why?", HINT, SHORT, "append") == "why?Q<>S<x+1>F<f(2)=4>"
    assert teacher_prompt("why?", Hint(feedback="no"), SHORT) == "Q<why?>F<no>"


CONVERSATIONS = {
    "one turn": [user("why?")],
    "system turn": [SYSTEM, user("why?")],
    "earlier turns": [SYSTEM, user("first"), assistant("a {b}"), user("why?")],
    "tool turns before": [
        user("first"),
        assistant(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
        {"role": "tool", "name": "f", "content": "3"},
        assistant("3"),
        user("why?"),
    ],
}
conversations = pytest.mark.parametrize("prompt", CONVERSATIONS.values(), ids=CONVERSATIONS)


@conversations
def test_the_last_user_turn_becomes_the_reprompt(prompt):
    before = copy.deepcopy(prompt)
    written = teacher_prompt(prompt, HINT, SHORT)
    assert written[:-1] == before[:-1]
    assert written[-1] == user("Q<why?>S<x+1>F<f(2)=4>")
    assert prompt == before


@conversations
def test_append_keeps_the_conversation_as_a_prefix(prompt):
    before = copy.deepcopy(prompt)
    written = teacher_prompt(prompt, HINT, SHORT, "append")
    assert written[: len(prompt)] == before
    assert written[len(prompt) :] == [user("Q<>S<x+1>F<f(2)=4>")]
    assert prompt == before


@pytest.mark.parametrize("placement", ["last_user", "append"])
@pytest.mark.parametrize(
    "last", [assistant("the answer"), {"role": "tool", "name": "f", "content": "3"}, SYSTEM], ids=lambda m: m["role"]
)
def test_a_conversation_that_ends_in_another_turn_is_appended_to(last, placement):
    prompt = [SYSTEM, user("why?"), last]
    before = copy.deepcopy(prompt)
    written = teacher_prompt(prompt, HINT, SHORT, placement)
    assert written == [*before, user("Q<>S<x+1>F<f(2)=4>")]
    assert prompt == before


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([IMAGE, {"type": "text", "text": "why?"}], [IMAGE, {"type": "text", "text": "Q<why?>F<no>"}]),
        ([{"type": "text", "text": "why?"}, IMAGE], [{"type": "text", "text": "Q<why?>F<no>"}, IMAGE]),
        (
            [IMAGE, {"type": "text", "text": "why", "cache": 1}, IMAGE, {"type": "text", "text": "?"}],
            [IMAGE, {"type": "text", "text": "Q<why?>F<no>", "cache": 1}, IMAGE],
        ),
        ([IMAGE], [IMAGE, {"type": "text", "text": "Q<>F<no>"}]),
        ([], [{"type": "text", "text": "Q<>F<no>"}]),
        (None, "Q<>F<no>"),
    ],
)
def test_images_stay_in_place(content, expected):
    prompt = [SYSTEM, user(content)]
    before = copy.deepcopy(prompt)
    written = teacher_prompt(prompt, Hint(feedback="no"), SHORT)
    assert written == [SYSTEM, user(expected)]
    assert prompt == before


def test_fields_of_the_turn_survive_and_nothing_is_shared():
    prompt = [{"role": "user", "content": [{"type": "text", "text": "why?"}], "name": "ann"}]
    written = teacher_prompt(prompt, HINT, SHORT)
    assert written[0]["name"] == "ann"
    written[0]["content"][0]["text"] = "changed"
    written[0]["role"] = "system"
    assert prompt == [{"role": "user", "content": [{"type": "text", "text": "why?"}], "name": "ann"}]


@tricky
def test_tricky_texts_reach_the_teacher_unchanged(text):
    prompt = [{"role": "system", "content": text}, user(text)]
    for placement in ("last_user", "append"):
        written = teacher_prompt(prompt, Hint(text, text), Templates(), placement)
        assert written[0]["content"] == text
        assert written[-1]["content"].count(text) >= (3 if placement == "last_user" else 2)
        assert written[-1]["content"].endswith("\n\nCorrectly solve the original question.\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([IMAGE], ""),
        ([{"type": "text", "text": "a"}, IMAGE, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_message_text(content, text):
    assert message_text(content) == text


# Demonstrations


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("x+1", False, "x+1"),
        ("  x+1\n", False, "x+1"),
        ("<think>no</think>x+1", False, "x+1"),
        ("<think>a\nb\n</think>\n\nx+1\n", False, "x+1"),
        ("<think></think>x+1", False, "x+1"),
        ("<think>a</think>x<think>b</think>+1", False, "x+1"),
        ("a</think>x+1", False, "x+1"),  # the generation header opened it, whether we were told or not
        ("a</think>x+1", True, "x+1"),
        ("<think>a</think>x+1", True, "x+1"),  # opened twice
        ("a</think>x<think>b</think>+1", True, "x+1"),
        ("a</think>b</think>x+1", False, "x+1"),
        ("a</think>b</think>x+1", True, "x+1"),
        ("x+1", True, None),  # never closed
        ("<think>x+1", False, None),
        ("<think>a</think>x+1<think>b", False, None),
        ("a</think>x+1<think>b", True, None),
        ("<think>a</think>", False, None),
        ("a</think> \n", True, None),
        ("", False, None),
        (" \n", False, None),
        ("", True, None),
        ("<thinking>x</thinking>", False, "<thinking>x</thinking>"),
        (r"<think>\d{2} {x}</think>\frac{1}{2}", False, r"\frac{1}{2}"),
    ],
)
def test_strip_thinking(text, opened, expected):
    assert strip_thinking(text, opened=opened) == expected


def test_many_openings_are_read_once():
    """Read again for each of them, this takes minutes."""
    start = time.monotonic()
    for text in ("<think>" * 140_000, "<think>a" * 100_000 + "</think>", "</think><think>" * 60_000):
        assert strip_thinking(text) is None
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("tags", [("[THINK]", "[/THINK]"), ("<|a|>", "<|b|>"), ("(.*)", "(+)")])
def test_strip_thinking_takes_other_tags_literally(tags):
    opening, closing = tags
    assert strip_thinking(f"{opening}a{closing}x+1", tags=tags) == "x+1"
    assert strip_thinking(f"a{closing}x+1", opened=True, tags=tags) == "x+1"
    assert strip_thinking("<think>a</think>x", tags=tags) == "<think>a</think>x"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}


def test_completion_text_of_answers_without_tools():
    assert completion_text("x+1\n") == "x+1\n"
    assert completion_text("") == ""
    assert completion_text([]) == ""
    assert completion_text([assistant("x+1")]) == "x+1"
    assert completion_text([assistant(None)]) == ""
    assert (
        completion_text([assistant([{"type": "text", "text": "x"}, IMAGE, {"type": "text", "text": "+1"}])]) == "x+1"
    )
    assert completion_text([{"role": "assistant"}, assistant("a"), assistant("b")]) == "a\nb"


def test_completion_text_shows_calls_and_replies_in_order():
    completion = [
        assistant("let me see", tool_calls=[CALL, {"name": "bare", "arguments": {}}]),
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "content": [{"type": "text", "text": "oops"}]},
        assistant(None, tool_calls=[CALL]),
        assistant("two", tool_calls=None),
    ]
    before = copy.deepcopy(completion)
    lines = completion_text(completion).split("\n")
    assert lines[0] == "let me see"
    assert json.loads(lines[1]) == CALL["function"] and "ü" in lines[1]
    assert json.loads(lines[2]) == {"name": "bare", "arguments": {}}
    assert "add" in lines[3] and lines[3].endswith("2")
    assert lines[4].endswith("oops")
    assert json.loads(lines[5]) == CALL["function"]
    assert lines[6:] == ["two"]
    assert completion == before


# Shortening


def cut_versions(text):
    """Every shortened version of `text`, longest first: a beginning and an end with a mark between them."""
    versions = []
    mark = "\n...\n"
    for kept in range(len(text) - 1, 0, -1):
        tail = (kept - len(mark)) // 3
        if kept - len(mark) < 3:  # no room for the mark
            versions.append(text[:kept])
        else:
            versions.append(text[: kept - len(mark) - tail] + mark + text[len(text) - tail :])
    return versions


def slow_shorten(hint, fits):
    if hint.feedback is not None:
        for version in cut_versions(hint.feedback):
            if fits(Hint(hint.solution, version)):
                return Hint(hint.solution, version)
    if hint.solution is None:
        return None
    for version in [hint.solution, *cut_versions(hint.solution)]:
        if fits(Hint(version)):
            return Hint(version)
    return None


def length(hint):
    return len(hint.solution or "") + len(hint.feedback or "")


@pytest.mark.parametrize(
    "hint",
    [
        Hint(feedback="0123456789" * 3),
        Hint(solution="abcdefghij" * 2),
        Hint("abcdefghij" * 2, "0123456789" * 3),
        Hint("abcdefghij" * 3, "01"),
        Hint("ab", "0123456789"),
        Hint("a", "0"),
    ],
    ids=lambda hint: f"{len(hint.solution or '')}+{len(hint.feedback or '')}",
)
def test_shorten_gives_the_longest_that_fits(hint):
    for budget in range(-1, length(hint)):

        def fits(candidate, budget=budget):
            return length(candidate) <= budget

        kept = shorten(hint, fits)
        assert kept == slow_shorten(hint, fits)
        if kept is not None:
            assert fits(kept) and kept != hint
            # The feedback goes before the demonstration loses a character.
            assert kept.solution == hint.solution or kept.feedback is None


def test_shorten_with_a_budget_of_words():
    """A tokenizer is no character count: several characters make one token, and cuts may add some."""
    hint = Hint("def f(x): return x + 1", " ".join(f"line {i}: expected {i}" for i in range(40)))

    def fits(candidate):
        return len(f"{candidate.solution or ''} {candidate.feedback or ''}".split()) <= 30

    kept = shorten(hint, fits)
    assert kept.solution == hint.solution and fits(kept)
    assert kept.feedback.startswith("line 0") and kept.feedback.endswith("39") and "..." in kept.feedback


def test_shorten_gives_nothing_when_nothing_fits():
    assert shorten(Hint("abc" * 9, "def" * 9), lambda hint: False) is None
    assert shorten(Hint(feedback="def" * 9), lambda hint: False) is None
    assert shorten(Hint(feedback=""), lambda hint: False) is None


def test_shorten_asks_few_times():
    calls = []

    def fits(hint):
        calls.append(hint)
        return length(hint) <= 5000

    kept = shorten(Hint(feedback="x" * 100_000), fits)
    assert 4998 <= length(kept) <= 5000
    assert len(calls) <= 20


# Imports


@pytest.mark.parametrize("module", ["feedback", "reprompt", "divergence"])
def test_pure_modules_import_without_trl(module):
    program = (
        "import sys\n"
        "for name in ('trl', 'transformers', 'accelerate', 'peft', 'datasets'): sys.modules[name] = None\n"
        f"import sdpo_trl.{module} as module\n"
        "print(module.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.strip() == f"sdpo_trl.{module}"


def test_reprompt_needs_the_standard_library_only():
    program = (
        "import sys, importlib.util as util\n"
        "sys.modules['torch'] = None\n"
        "spec = util.spec_from_file_location('reprompt', 'sdpo_trl/reprompt.py')\n"
        "module = util.module_from_spec(spec)\n"
        "sys.modules['reprompt'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(module.reprompt_text('q', module.Hint('s'), module.Templates()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.startswith("q\nCorrect solution:\n\ns\n")
