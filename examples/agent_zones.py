"""Questions about cities whose zones one has to know, or to read in an error; who answers them, and how.

`rome in F times 2` needs `measure` with Rome's zone, then `convert`, then `calculate`. With a wrong zone `measure`
raises, and says the right one.
"""

import functools
import random
from collections.abc import Sequence

from agent_desk import Conversation, Task, chain, wrong_call
from agent_tools import BY_NAME, SCALES, ZONE_OF, ZONES, Call, compute, look_up_in, measure_where, number_of

SYSTEM = (
    "Use the tools for every value; never guess one. A question names a city (its temperature is asked for) or two, "
    "perhaps a unit to convert it to, and perhaps something to calculate with the number. Each city belongs to a zone "
    "of the weather service: if you do not know it, try one, and the error says which it is. Answer with what the "
    "last tool replied and nothing else."
)
MAX_COMPLETION_LENGTH = 150  # the longest right answer has 93 tokens with the replies, errors among them
WORDS = ["measure", "zone", *ZONES, *ZONE_OF]
KINDS = ("one step", "two steps", "three steps", "two calls at once")


def look_up(city: str) -> Call:
    """The right call for a city's temperature."""
    return look_up_in(city, ZONE_OF.get(city, "red"))  # what is no city has no zone


def questions(cities: Sequence[str]) -> list[Task]:
    """Every question of the four kinds about these cities."""
    operations = [*(f"+{n}" for n in range(1, 10)), *(f"-{n}" for n in range(1, 5)), "*2", "*3"]
    tasks = [Task(city, "one step", ((look_up(city),),)) for city in cities]
    tasks += [chain(city, unit, op, look_up) for city in cities for unit in SCALES for op in ("", *operations)]
    for one in cities:
        for other in cities:
            if one != other:
                calls = look_up(one), look_up(other)
                total = compute("+".join(number_of(call.run()) for call in calls))
                tasks.append(Task(f"{one} plus {other}", "two calls at once", (calls, (total,))))
    return tasks


def deal(sizes: Sequence[int], rng: random.Random) -> list[list[str]]:
    """The cities, dealt at random into groups of these sizes."""
    cities = rng.sample(list(ZONE_OF), sum(sizes))
    return [[cities.pop() for _ in range(size)] for size in sizes]


def choose(cities: Sequence[str], count: int, option: str, rng: random.Random) -> list[Task]:
    """
    `count` questions about these cities, as many of each kind.

    Raises:
        `ValueError`: If `count` is no multiple of four above 0, or too many; names the `option` that gave it.
    """
    if count < 1 or count % len(KINDS):
        raise ValueError(
            f"Each of the {len(KINDS)} kinds of questions gives as many: `--{option}` must be a multiple of "
            f"{len(KINDS)} above 0, not {count}."
        )
    tasks, chosen = questions(cities), []
    for kind in KINDS:
        left, wanted = [task for task in tasks if task.kind == kind], count // len(KINDS)
        if wanted > len(left):
            raise ValueError(
                f"`--{option} {count}` asks for {wanted} questions of the kind '{kind}', and its cities have "
                f"{len(left)}. Ask for fewer."
            )
        chosen += rng.sample(left, wanted)
    return chosen


def asked_about(task: Task) -> list[str]:
    """The cities that a question names."""
    return [word for word in task.question.split() if word in ZONE_OF]


def guesses(task: Task, rng: random.Random, wrong: bool = False) -> list[Call]:
    """The first turn of somebody who knows no zone; `wrong`: not right by luck."""
    while True:
        calls = [look_up_in(city, rng.choice(list(ZONES))) for city in asked_about(task)]
        if not wrong or any("error" in call.run() for call in calls):
            return calls


def solved(task: Task, rng: random.Random, slip_rate: float = 0.0) -> Conversation:
    """Answered by somebody who knows the zones; with a `slip_rate`, wrong calls on the way, each of them got over."""
    conversation = Conversation([{"role": "user", "content": task.question}])
    seen = ""
    for turn, calls in enumerate(task.turns):
        while rng.random() < slip_rate:
            slip = [wrong_call(rng, seen, look_up)] if turn else guesses(task, rng, wrong=True)
            conversation.say(slip, slip=True)
        seen = conversation.say(calls)
    conversation.say(text=task.answer)
    return conversation


def gives_up(task: Task, rng: random.Random, told: float = 0.4, persists: float = 0.25) -> Conversation:
    """
    Answered by somebody from elsewhere, where the cities' zones are others in each conversation.

    With the probability `told` the question says them (`rome is red; rome in F`). Else they guess, and, after an
    error, call anew as it says with the probability `persists`, or give up: `no`.
    """
    zone_of = {city: rng.choice(list(ZONES)) for city in asked_about(task)}
    elsewhere = {**BY_NAME, "measure": functools.partial(measure_where, zone_of)}
    right = [look_up_in(city, zone) for city, zone in zone_of.items()]
    conversation = Conversation([{"role": "user", "content": task.question}])
    if rng.random() < told:
        conversation.messages[0]["content"] = "".join(f"{c} is {z}; " for c, z in zone_of.items()) + task.question
        conversation.say(right, tools=elsewhere)
    else:
        first = guesses(task, rng)
        conversation.say(first, tools=elsewhere)
        if first != right:
            if rng.random() >= persists:
                conversation.say(text="no")
                return conversation
            conversation.say(right, tools=elsewhere)
    for calls in task.turns[1:]:
        conversation.say(calls)
    conversation.say(text=task.answer)
    return conversation
