"""The quickstart's task: programs named by two letters, and a model that can use a hint but cannot know the names.

A name such as `QC` stands for a hidden three-character program, one of 36 (`x+c`, `x*c`, `c-x`, `x-c`, c = 1..9): its
first letter means the operation, its second the constant. An attempt is parsed (never evaluated as Python) and run on
two inputs; the outcome of a failed test, `f(2)=4 f(3)=6`, is the feedback. The 26 letters form two alphabets of 4 + 9:
*known* letters, whose meaning the warm start teaches, and *new* ones, whose 36 names split into trained and unseen.

This module knows the task, the tokenizer, the model and the warm start. It does not know the trainer.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sdpo_trl.reprompt import Hint, Templates, teacher_prompt

# The teacher's prompt, as three options of the trainer. Short, because every character is a token here, and with the
# question last, so that the answer follows the same characters with and without a hint.
REPROMPT_TEMPLATE = "{solution}{feedback}{prompt}"
SOLUTION_TEMPLATE = "{successful_previous_attempt};"
FEEDBACK_TEMPLATE = "{feedback_raw};"
TEMPLATES = Templates(REPROMPT_TEMPLATE, SOLUTION_TEMPLATE, FEEDBACK_TEMPLATE)

OPERATIONS = ("+", "*", "r", "-")  # "r" is minus with its operands reversed, `c-x`
CONSTANTS = range(1, 10)
TEST_INPUTS = (2, 3)  # two values tell all 36 programs apart
MAX_COMPLETION_LENGTH = 4  # three characters and EOS
NUM_TRAINED = 24
HintKind = Literal["none", "solution", "feedback", "both"]
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.ascii_uppercase + string.digits + "xf+-*=();: \n"


@dataclass(frozen=True)
class Program:
    """One of the 36 programs: `x+c`, `x*c`, `c-x` (operation `r`) or `x-c`."""

    operation: str
    constant: int

    def __str__(self) -> str:
        return f"{self.constant}-x" if self.operation == "r" else f"x{self.operation}{self.constant}"

    def __call__(self, x: int) -> int:
        c = self.constant
        return {"+": x + c, "*": x * c, "r": c - x, "-": x - c}[self.operation]


PROGRAMS = tuple(Program(operation, constant) for operation in OPERATIONS for constant in CONSTANTS)
_PROGRAM_OF_TEXT = {str(program): program for program in PROGRAMS}


@dataclass(frozen=True)
class Task:
    """A name and the program that it stands for."""

    name: str
    program: Program

    @property
    def prompt(self) -> str:
        return f"{self.name}="


def parse_program(text: str) -> Program | None:
    """The program that `text` spells exactly, or None."""
    return _PROGRAM_OF_TEXT.get(text)


def run_tests(program: Program) -> str:
    """What a program returns on the test inputs, as text: `f(2)=4 f(3)=6`."""
    return " ".join(f"f({x})={program(x)}" for x in TEST_INPUTS)


def grade(completion: str, target: str) -> tuple[float, str | None]:
    """Run an attempt against the tests of the hidden program `target`.

    Returns `(1.0, None)` for a pass, else `(0.0, feedback)`: what the tests expect. Text that is no program fails like
    a wrong program.
    """
    attempt, hidden = parse_program(completion), parse_program(target)
    if hidden is None:
        raise ValueError(f"target must be one of the 36 programs, for example 'x+3', but is {target!r}")
    if attempt is not None and all(attempt(x) == hidden(x) for x in TEST_INPUTS):
        return 1.0, None
    return 0.0, run_tests(hidden)


@dataclass(frozen=True)
class Alphabet:
    """Letters for the four operations and the nine constants, in the order of `OPERATIONS` and `CONSTANTS`."""

    operations: str
    constants: str

    def name(self, program: Program) -> str:
        """The two letters that stand for a program."""
        return self.operations[OPERATIONS.index(program.operation)] + self.constants[program.constant - 1]

    def tasks(self) -> list[Task]:
        """All 36 names, each with its meaning."""
        return [Task(self.name(program), program) for program in PROGRAMS]


def alphabets(seed: int) -> tuple[Alphabet, Alphabet]:
    """The 26 letters, dealt at random: the known alphabet and the new one."""
    letters = "".join(random.Random(seed).sample(string.ascii_uppercase, 26))
    return Alphabet(letters[:4], letters[4:13]), Alphabet(letters[13:17], letters[17:])


def all_tasks(seed: int) -> tuple[list[Task], list[Task], list[Task]]:
    """`(trained, unseen, known)`: 24, 12 and 36 tasks.

    Each operation letter is trained with six constants and each constant letter with at least two operations, so the
    meaning of an unseen pair can be put together from trained ones.
    """
    known, new = alphabets(seed)
    tasks = random.Random(seed).sample(new.tasks(), 36)
    unseen: list[Task] = []
    for task in tasks:
        same_operation = sum(other.name[0] == task.name[0] for other in unseen)
        same_constant = sum(other.name[1] == task.name[1] for other in unseen)
        if len(unseen) < 36 - NUM_TRAINED and same_operation < 3 and same_constant < 2:
            unseen.append(task)
    trained = [task for task in tasks if task not in unseen]
    return trained, unseen, known.tasks()


def render(prompt: str, solution: str | None = None, feedback: str | None = None) -> str:
    """The trainer's own teacher prompt; without a hint, the prompt itself."""
    if solution is None and feedback is None:
        return prompt
    return teacher_prompt(prompt, Hint(solution, feedback), TEMPLATES)


def hinted_prompt(task: Task, hint: HintKind) -> str:
    """A task's prompt as the teacher reads it, with the correct program and / or the outcome of a failed test."""
    solution = str(task.program) if hint in ("solution", "both") else None
    feedback = run_tests(task.program) if hint in ("feedback", "both") else None
    return render(task.prompt, solution, feedback)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; pads on the left."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, eos_token=EOS, padding_side="left", model_max_length=128
    )


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, *, hidden_size: int = 128, num_layers: int = 2, positions: int = 128
) -> LlamaForCausalLM:
    """A Llama with random weights, 341,120 parameters by default, in float32."""
    return tiny_llama.build_model(tokenizer, seed, hidden_size=hidden_size, num_layers=num_layers, positions=positions)


def warm_start_rows(seed: int, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """`count` pairs of prompt and answer: 40 % without a hint, else with a solution, feedback, or both.

    The two letters of a name are drawn apart, each known or new. A known letter has its meaning, a new one any,
    so a bare prompt teaches nothing about it, but it does teach that a name is read letter by letter.
    """
    known, new = alphabets(seed)
    rows = []
    for _ in range(count):
        hint = rng.choices(("none", "solution", "feedback", "both"), (0.4, 0.2, 0.3, 0.1))[0]
        program = rng.choice(PROGRAMS)
        names = known.name(program), new.name(rng.choice(PROGRAMS))
        task = Task("".join(rng.choice(letters) for letters in zip(*names, strict=True)), program)
        rows.append((hinted_prompt(task, hint), str(program)))
    return rows


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    steps: int = 400,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    make_rows: Callable[[int, int, random.Random], list[tuple[str, str]]] = warm_start_rows,
) -> None:
    """
    Teach the model, in place, what the rows hold: the known names and the use of hints, while the new names stay
    without a meaning.
    """
    rng = random.Random(seed)

    def draw() -> list[tiny_llama.Row]:
        return tiny_llama.answers(tokenizer, sorted(make_rows(seed, batch_size, rng), key=lambda row: len(row[0])))

    tiny_llama.warm_start(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)


def success_rate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, tasks: list[Task], hint: HintKind = "none"
) -> float:
    """Expected share of passes at sampling temperature 1, exactly: the mean probability of the only right answer.

    No two of the 36 programs agree on the test inputs, so the right answer is one token sequence, EOS included, and
    its probability needs no sampling. With a `hint`, the in-context ability that the self-teacher lives on.
    """
    rows = [(hinted_prompt(task, hint), str(task.program)) for task in tasks]
    return mean_probability(model, tokenizer, rows)


def mean_probability(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[tuple[str, str]]
) -> float:
    """The mean probability of an answer, EOS included, given its prompt."""
    return tiny_llama.mean_probability(model, tokenizer, tiny_llama.answers(tokenizer, rows))
