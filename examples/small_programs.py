"""Small Python programs, and a model of 0.4 million parameters that writes them: what train_code.py and test_time.py
run on offline.

Two families of problems, both graded by `CodeReward`, that is, by running what the model wrote in the sandbox:

- *names*: `QC:` asks for the program that two letters stand for, `def f(x): return x+3`. The quickstart's task
  (letters.py) with real programs: letters with a known meaning, new ones to be learned, unseen pairs of new ones.
- *tables*: `table 7:` asks for `def f(x): return [3,1,4][x]`, one of 1,000. A failed test tells one of the three
  numbers, and which one depends on how far the attempt got.

The model is warm-started in a minute so that it writes such programs, and can *use* what a failed test says, or a
correct program, in its prompt. This module knows tasks, tokenizer and warm start. It does not know trainers.
"""

import random
from collections.abc import Callable

import letters
from letters import Program, Task
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sdpo_trl.environments.code_feedback import feedback_text
from sdpo_trl.environments.code_tests import CodeTest, Outcome, Verdict, write_tests
from sdpo_trl.environments.program import Run

BEGIN, END = "```python\ndef f(x): return ", "\n```"
FAILED, ARGUMENTS = "Your program failed public test ", ": wrong answer.\nArguments:\n["
EXPECTED, GOT = "]\nExpected:\n", "\nGot:\n"
PUBLIC_INPUT, HIDDEN_INPUT = 10, 4  # the value at 10 tells all 36 programs apart; the other one catches constants
TABLE = 3
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_COMPLETION_LENGTH = 16
# As in letters.py: short, and with the question last.
TEMPLATES = {
    "reprompt_template": letters.REPROMPT_TEMPLATE,
    "solution_template": letters.SOLUTION_TEMPLATE,
    "feedback_template": letters.FEEDBACK_TEMPLATE,
}


def fenced(expression: object) -> str:
    """The whole answer whose function returns `expression`."""
    return f"{BEGIN}{expression}{END}"


def _row(identity: str, prompt: str, public: list[CodeTest], hidden: list[CodeTest]) -> dict:
    return {
        "id": identity, "prompt": prompt, "public_tests": write_tests(public), "hidden_tests": write_tests(hidden),
        "function": "f", "difficulty": "",
    }  # fmt: skip


def name_row(task: Task) -> dict:
    """The problem of a name, as `CodeReward` reads it."""
    public, hidden = ([CodeTest([x], task.program(x))] for x in (PUBLIC_INPUT, HIDDEN_INPUT))
    return _row(task.name, name_prompt(task.name), public, hidden)


def name_prompt(name: str) -> str:
    return f"{name}:"


def table_row(number: int, table: list[int]) -> dict:
    """The problem of a table; all of its tests are public, each about one entry."""
    return _row(f"table {number}", f"table {number}:", [CodeTest([x], value) for x, value in enumerate(table)], [])


def hidden_tables(count: int, seed: int) -> list[list[int]]:
    """The tables to be found, different ones."""
    numbers = random.Random(seed).sample(range(10**TABLE), count)
    return [[int(digit) for digit in f"{number:0{TABLE}}"] for number in numbers]


def failure(place: int, tests: list[CodeTest], got: int) -> str:
    """What `CodeReward` says of a program that returned `got` in the public test `place`."""
    run = Run("ok", 0, "", "", 0.0, 0.0)
    outcome = Outcome(tests[place], run, "wrong", got)
    verdict = Verdict(place, len(tests), len(tests), public_failure=outcome, public_index=place)
    return feedback_text(verdict, True) or ""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, and one for each phrase that every answer or failure repeats."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([BEGIN, END, FAILED, ARGUMENTS, EXPECTED, GOT, " of 1", f" of {TABLE}", "table "])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left",
        model_max_length=256, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def name_rows(seed: int, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """
    `count` pairs of prompt and answer: 40 % without a hint, else with a solution, a failed test, or both.

    As in letters.py: known letters have their meaning, new ones any, so that a bare prompt teaches nothing about them.
    """
    known, new = letters.alphabets(seed)
    rows = []
    for _ in range(count):
        hint = rng.choices(("none", "solution", "feedback", "both"), (0.4, 0.2, 0.3, 0.1))[0]
        program, attempt = rng.choice(letters.PROGRAMS), rng.choice(letters.PROGRAMS)
        spelled = known.name(program), new.name(rng.choice(letters.PROGRAMS))
        name = "".join(rng.choice(pair) for pair in zip(*spelled, strict=True))
        rows.append((hinted_name(name, program, attempt, hint), fenced(program)))
    return rows


def hinted_name(name: str, program: Program, attempt: Program, hint: letters.HintKind) -> str:
    """A name's prompt as the teacher reads it, with the program and / or what is said of a failed attempt."""
    tests = [CodeTest([PUBLIC_INPUT], program(PUBLIC_INPUT))]
    solution = fenced(program) if hint in ("solution", "both") else None
    feedback = failure(0, tests, attempt(PUBLIC_INPUT)) if hint in ("feedback", "both") else None
    return letters.render(name_prompt(name), solution, feedback)


def table_rows(seed: int, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """As [`name_rows`]: any table without a hint, one with the right entry where a failed test tells it."""
    rows = []
    for _ in range(count):
        table = [rng.randrange(10) for _ in range(TABLE)]
        prompt, hint = f"table {rng.randrange(100)}:", rng.random()
        tests = [CodeTest([x], value) for x, value in enumerate(table)]
        place = rng.randrange(TABLE)
        told = failure(place, tests, rng.choice([n for n in range(10) if n != table[place]])) if hint > 0.3 else None
        shown = fenced(str(table).replace(" ", "") + "[x]")
        rows.append((letters.render(prompt, shown if hint > 0.9 else None, told), shown))
    return rows


def warm_started(
    rows: Callable[[int, int, random.Random], list[tuple[str, str]]], seed: int, *, steps: int = 400
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model and its tokenizer, taught to write the programs of one family."""
    tokenizer = build_tokenizer()
    model = letters.build_model(tokenizer, seed, positions=256)
    letters.warm_start(model, tokenizer, seed, steps=steps, make_rows=rows)
    return model, tokenizer


def exact_success(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tasks: list[Task], hint: letters.HintKind = "none"
) -> float:
    """
    Expected share of passes at temperature 1, exactly: the mean probability of the only program that is right, its end
    token included. With a hint, the in-context ability that the self-teacher lives on.
    """
    wrong = [next(p for p in letters.PROGRAMS if p != task.program) for task in tasks]
    rows = [
        (hinted_name(task.name, task.program, attempt, hint), fenced(task.program))
        for task, attempt in zip(tasks, wrong, strict=True)
    ]
    return letters.mean_probability(model, tokenizer, rows)
