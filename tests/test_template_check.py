"""The check of chat templates before the first step: templates that are shipped pass, broken ones are named."""

import logging
from importlib import resources

import pytest
import tiny
from datasets import Dataset, IterableDataset
from trl.data_utils import prepare_multimodal_messages

from sdpo_trl.reprompt import Templates
from sdpo_trl.template_check import TemplateCheckError, chat_marks, check_templates, unknown_switches

SHIPPED = sorted(
    path.name.removesuffix(".jinja")
    for path in resources.files("trl").joinpath("chat_templates").iterdir()
    if path.name.endswith(".jinja")
)
# Those that refuse two user turns in a row, and those that read typed blocks alone, as a processor gives them.
ALTERNATING = ("cohere", "cohere2", "gemma", "gemma3")
BLOCKS = ("idefics3", "llava_next", "smolvlm")

USER = [{"role": "user", "content": "What is 17 * 23?"}]
TURNS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And 17 * 23?"},
]
SYSTEM = [{"role": "system", "content": "Answer with a number."}, *USER]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}},
            "required": ["a"],
        },
        "return": {"type": "integer", "description": "The sum."},
    },
}
CALLED = [
    *USER,
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]},
    {"role": "tool", "name": "add", "content": "3"},
]  # fmt: skip
CASES = {  # prompt, placement, options of the template, tools
    "user": (USER, "last_user", {}, None),
    "turns": (TURNS, "last_user", {}, None),
    "system": (SYSTEM, "last_user", {}, None),
    "tools": (SYSTEM, "last_user", {}, [TOOL]),
    "thinking off": (USER, "last_user", {"enable_thinking": False}, None),
    "thinking on": (TURNS, "last_user", {"enable_thinking": True}, None),
    "append": (USER, "append", {}, None),
    "append to turns": (TURNS, "append", {"enable_thinking": False}, None),
    "tool turn": (CALLED, "last_user", {}, [TOOL]),
}


def renderer(template, options=None, tools=None, blocks=False):
    tokenizer = tiny.build_tokenizer()
    tokenizer.bos_token = "<s>"

    def render(messages, header):
        messages = prepare_multimodal_messages(messages) if blocks else messages
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=header, chat_template=template, tools=tools,
            **(options or {}),
        )  # fmt: skip

    return render


def check(template, case="user", blocks=False):
    prompt, placement, options, tools = CASES[case]
    check_templates(
        renderer(template, options, tools, blocks),
        prompt,
        Templates(),
        placement,
        switches={name: renderer(template, {}, tools, blocks) for name in options},
    )


def shipped(name):
    return resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


def family(name):
    return name.removesuffix("_training")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_templates_that_trl_ships_pass(name):
    template, blocks = shipped(name), family(name) in BLOCKS
    for case, (prompt, _, options, tools) in CASES.items():
        try:
            renderer(template, options, tools, blocks)(prompt, True)
        except Exception:  # what the template says no to, the student cannot be asked either
            assert case in ("system", "tools", "tool turn"), case
            continue
        if family(name) in ALTERNATING and case.startswith("append"):
            with pytest.raises(TemplateCheckError, match=r"roles must alternate.*reprompt_placement='last_user'"):
                check(template, case, blocks)
        else:
            check(template, case, blocks)
    assert len(chat_marks(renderer(template, blocks=blocks))) >= 2  # a rendered chat would be recognised


def test_a_template_of_typed_blocks_that_is_given_text_shows_nothing():
    with pytest.raises(TemplateCheckError, match="check of feedback"):
        check(shipped("smolvlm"))


BROKEN = {
    # The header knows how many turns there were.
    "header": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% if messages|length > 1 %}<think>{% endif %}{% endif %}",
        "append", r"ends in '<\|end\|><\|assistant\|>', and the teacher's does not",
    ),
    # The last turn is cut.
    "feedback": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content[:40] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "user", "lacks the feedback 'The check says",
    ),
    # What came before the last turn is dropped where the last one is long.
    "feedback of turns": (
        "{% for m in messages %}{% if loop.last or messages[-1].content|length < 60 %}<|{{ m.role }}|>{{ m.content }}"
        "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "turns", "lacks the user turn 'What is 2",
    ),
    # The switch is forgotten in longer texts.
    "switches": (
        "{% for m in messages %}<|{{ m.role }}|>{% if enable_thinking is false and m.content|length < 60 %}/no_think "
        "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "thinking off", "`enable_thinking` changes what the student reads, but not",
    ),
    # Capital letters.
    "upper": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content|upper }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "user", "check of feedback",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_template_is_named_with_both_texts(fault):
    template, case, what = BROKEN[fault]
    with pytest.raises(TemplateCheckError, match=what) as caught:
        check(template, case)
    message = str(caught.value)
    assert "--- The student reads:\n" in message and "--- The teacher reads:\n" in message
    student = renderer(template, CASES[case][2], CASES[case][3])(CASES[case][0], True)
    assert student in message


def test_a_header_that_ignores_the_flag_is_compared_too():
    plain = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endfor %}"
    check(plain)
    late = plain.replace("[/{{ m.role }}]", "{% if m.content|length < 60 %} [/{{ m.role }}]{% endif %}")
    with pytest.raises(TemplateCheckError, match=r"ends in ' +\[/user\]', and the teacher's does not"):
        check(late)


def test_words_that_also_stand_in_the_header_confuse_nobody():
    for word in ("a", "assistant", "<|assistant", "end", ">"):
        check_templates(renderer(tiny.CHAT_TEMPLATE), [{"role": "user", "content": word}], Templates())
        check_templates(renderer(shipped("phi3")), [{"role": "user", "content": word}], Templates())


def test_thinking_that_the_template_drops_for_the_teacher_alone_is_no_fault():
    thinking = "<think>\nI should add.\n</think>"
    called = {**CALLED[1], "content": f"{thinking}\n\nAdding."}
    for rows in ([*USER, called, CALLED[2]], [*USER, {"role": "assistant", "content": f"{thinking}\n\nAdding."}],
                 [*USER, {"role": "assistant", "content": thinking}]):  # fmt: skip
        render = renderer(shipped("qwen3"), tools=[TOOL])
        assert "I should add." in render(rows, True)
        check_templates(render, rows, Templates())
    forgetful = "{% for m in messages %}{% if loop.last or messages|length < 3 %}<|{{ m.role }}|>{{ m.content }}" \
        "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"  # fmt: skip
    with pytest.raises(TemplateCheckError, match="lacks the user turn"):
        check_templates(renderer(forgetful), rows, Templates())
    assistant = forgetful.replace("loop.last or", "loop.last or m.role == 'user' or")
    with pytest.raises(TemplateCheckError, match=r"lacks the assistant turn 'Adding\.'"):
        check_templates(renderer(assistant), [*USER, {**called, "tool_calls": None}], Templates())


@pytest.mark.parametrize("name", ["gemma4_v5", "diffusion_gemma"])
def test_a_header_of_another_mode_behind_a_tools_reply_is_a_fault(name):
    check_templates(renderer(shipped(name), tools=[TOOL]), CALLED, Templates())
    with pytest.raises(TemplateCheckError, match="check of header"):
        check_templates(renderer(shipped(name), {"enable_thinking": True}, [TOOL]), CALLED, Templates())


def test_an_option_that_the_template_cannot_do_without_is_no_fault():
    needs = tiny.CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ language.upper() }}{% endif %}"
    options = {"language": "de"}
    check_templates(renderer(needs, options), USER, Templates(), switches={"language": renderer(needs)})
    says = tiny.CHAT_TEMPLATE + "{% if not language %}{{ raise_exception('no language') }}{% endif %}"
    check_templates(renderer(says, options), USER, Templates(), switches={"language": renderer(says)})


def test_what_stands_behind_the_words_in_blocks_is_no_header():
    blocks = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for b in m.content %}{{ '<image>' if b.type == 'image' else b.text }}{% endfor %}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image"}]}]
    written = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "text", "text": " And?"}]}]
    for placement in ("last_user", "append"):
        check_templates(renderer(blocks), prompt, Templates(), placement)
    check_templates(renderer(shipped("lfm2")), written, Templates(), "append")  # which writes lists as JSON
    late = blocks.replace("<|assistant|>", "<|assistant|>{% if messages|length > 1 %}<think>{% endif %}")
    with pytest.raises(TemplateCheckError, match="check of header"):
        check_templates(renderer(late), prompt, Templates(), "append")


def test_a_lone_tag_in_a_question_is_no_chat():
    for template, text in (
        ("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", "What does [INST] mean?"),
        ("{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}", "Is <user> a tag of HTML?"),
    ):
        check_templates(renderer(template), [{"role": "user", "content": text}], Templates())
        inner = renderer(template)(USER, True)
        with pytest.raises(TemplateCheckError, match="check of nesting"):
            check_templates(renderer(template), [{"role": "user", "content": inner}], Templates())


def test_a_chat_inside_of_a_message_is_found():
    render = renderer(tiny.CHAT_TEMPLATE)
    inner = render(USER, True)
    for content in (inner, f"Now:\n{inner}", render(USER, False)):
        with pytest.raises(TemplateCheckError, match=r"check of nesting: message 0 \(user\) holds a rendered chat"):
            check_templates(render, [{"role": "user", "content": content}], Templates())
    with pytest.raises(TemplateCheckError, match="check of nesting"):
        check_templates(render, USER, Templates(reprompt="<|user|>{prompt}{solution}{feedback}<|end|><|assistant|>"))
    # Words that only look like it, and a template without marks of its own.
    check_templates(render, [{"role": "user", "content": "user: what does <user> mean in HTML?"}], Templates())
    words = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert chat_marks(renderer(words)) == []
    check_templates(renderer(words), [{"role": "user", "content": "assistant: user: hello"}], Templates())


def test_a_text_that_is_a_rendered_chat_must_end_where_the_answer_begins():
    render = renderer(tiny.CHAT_TEMPLATE)
    with pytest.raises(TemplateCheckError, match="the feedback would stand behind that, inside of the answer"):
        check_templates(render, render(USER, True), Templates())
    check_templates(render, render(USER, True), Templates(reprompt="{solution}{feedback}{prompt}"))
    check_templates(render, "2 + 3 =", Templates())


# In the trainer


def test_the_trainer_is_not_made_with_a_broken_template(tmp_path):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = BROKEN["feedback"][0]
    options = {"trainer_processing_class": tokenizer, "data": tiny.prompts(chat=True)}
    with pytest.raises(TemplateCheckError, match="lacks the feedback"):
        tiny.trainer(tmp_path, tiny.telling(), **options)
    tiny.trainer(tmp_path, tiny.telling(), distillation_weight=0.0, **options)  # no teacher reads it
    plain = {**options, "data": tiny.prompts()}
    tiny.trainer(tmp_path, tiny.telling(), **plain)  # nor is it used for plain text


def rows_of(prompts):
    for prompt in prompts * 8:
        yield {"prompt": prompt}


def test_rows_that_cannot_be_read_ahead_are_checked_with_the_first_batch(tmp_path):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = BROKEN["feedback"][0]
    data = IterableDataset.from_generator(rows_of, gen_kwargs={"prompts": tiny.prompts(chat=True)["prompt"][:]})
    trainer = tiny.trainer(tmp_path, tiny.telling(), data=data, trainer_processing_class=tokenizer)
    before = tiny.trained(trainer.model)
    with pytest.raises(TemplateCheckError, match="lacks the feedback"):
        trainer.train()
    tiny.assert_equal(tiny.trained(trainer.model), before)


def test_other_spellings_of_rows_are_checked_too(tmp_path):
    tokenizer = tiny.build_tokenizer()
    rows = [{"conversations": [{"from": "human", "value": tokenizer.apply_chat_template(USER, tokenize=False)}]}] * 4
    with pytest.raises(TemplateCheckError, match="holds a rendered chat"):
        tiny.trainer(tmp_path, tiny.telling(), data=Dataset.from_list(rows))


def test_a_switch_that_the_template_does_not_read_is_spoken_of(tmp_path, caplog):
    options = {"data": tiny.prompts(chat=True), "chat_template_kwargs": {"think": True, "enable_thinking": False}}
    with caplog.at_level(logging.WARNING):
        tiny.trainer(tmp_path, tiny.telling(), **options)
    said = [m for m in caplog.messages if "chat template reads no" in m]
    assert len(said) == 1 and "enable_thinking" in said[0] and " think," not in said[0]
    assert unknown_switches("{{ thinking }}", {"think": 1, "thinking": 2}) == ["think"]


def test_the_check_takes_milliseconds(tmp_path):
    import time

    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = shipped("qwen3_8")
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), data=tiny.prompts(chat=True), trainer_processing_class=tokenizer,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    start = time.process_time()
    for _ in range(5):
        trainer._prompt_builder.check(USER)
    assert (time.process_time() - start) / 5 < 0.1
