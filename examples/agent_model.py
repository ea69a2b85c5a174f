"""The agents' tokenizer and models, and how they are taught to call tools before a trainer gets them."""

import random
import re
import string
from collections.abc import Callable, Sequence

import tiny_llama
from agent_desk import Conversation
from agent_tools import CELSIUS, OPERATIONS, TOOLS, UNITS
from tiny_llama import Row
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

POSITIONS = 512
PAD, EOS = "<pad>", "<eos>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
# What a call is made of besides its words, a token each, so that a call is short.
CALL_PARTS = ['<tool_call>{"name": "', '", "arguments": {"', '": "', '", "', '"}}</tool_call>', "{'error': '", "'}"]
WORDS = [
    *(tool.__name__ for tool in TOOLS), "city", "quantity", "unit", "expression", *CELSIUS, *UNITS,
    *OPERATIONS.values(), "in", "no", "wrong", "tool", "missing", "step",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t['function']['name'] }}{{ ' ' if not loop.last }}{% endfor %}"
    "{% endif %}{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>{\"name\": \"{{ c['function']['name'] }}\", "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": EOS, "content": "text"},
    },
}  # fmt: skip


def build_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token per known word, part of a call, digit and other character; pads on the left."""
    whole = [*CALL_PARTS, *WORDS, *words]
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([PAD, EOS, "<unk>", *ROLES, *whole, *characters]))}
    longest_first = sorted(whole, key=len, reverse=True)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*(re.escape(token) for token in longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token="<unk>", additional_special_tokens=ROLES,
        padding_side="left", model_max_length=POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, hidden_size: int = 96, num_layers: int = 2, spread: float = 0.02
) -> LlamaForCausalLM:
    """A Llama with random weights of the standard deviation `spread`, in float32."""
    return tiny_llama.build_model(
        tokenizer, seed, hidden_size=hidden_size, num_layers=num_layers, positions=POSITIONS, initializer_range=spread
    )


def encode(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], tools: Sequence[Callable] = TOOLS
) -> list[Row]:
    """Token ids and labels of each conversation; labels are -100 outside the assistant's turns, and in slips."""
    rows = []
    for conversation in conversations:
        encoded = tokenizer.apply_chat_template(
            conversation.messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        turn, before, labels = -1, 0, []
        for token, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            turn += own and not before
            before = own
            labels.append(token if own and turn not in conversation.slips else -100)
        rows.append((encoded["input_ids"], labels))
    return rows


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    seed: int,
    *,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    tools: Sequence[Callable] = TOOLS,
) -> None:
    """Teach the model, in place, to go on as the assistant does in these conversations."""
    rows, rng = encode(tokenizer, conversations, tools), random.Random(seed)

    def draw() -> list[Row]:
        return sorted(rng.sample(rows, batch_size), key=lambda row: len(row[0]))

    tiny_llama.warm_start(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)


def success_rate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, talks: Sequence[Conversation]) -> float:
    """The mean probability, exactly, that the model says all that the assistant says in these conversations."""
    return tiny_llama.mean_probability(model, tokenizer, encode(tokenizer, talks))
