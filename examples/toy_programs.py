"""Six attempts at three small programs: the selection rule and the loss, with nothing else around them.

    python examples/toy_programs.py

A program is three characters, `x+1` or `x*x`. Unit tests really run each attempt. The student is a table of logits,
one row per attempt over all programs; the teacher is that student after it has read its feedback, a correct program
or the outcome of the failed tests. `select_feedback` decides who reads what, `feedback_reverse_kl` trains. The last
attempt has nothing to read, so its distribution stays as it is, bit for bit.
"""

import torch

from sdpo_trl import feedback_reverse_kl, select_feedback

PROGRAMS = [f"x{operation}{operand}" for operation in "+-*" for operand in "123x"]
TESTS = {"add-one": {0: 1, 3: 4}, "double": {1: 2, 3: 6}, "square": {2: 4, 3: 9}}  # input -> expected output
# Question, program, and whether the environment shows the outcome of a failed test.
ATTEMPTS = [
    ("add-one", "x+1", False),  # succeeds: its own solution
    ("add-one", "x+2", False),  # fails: the solution of row 0
    ("double", "x*3", True),  # fails: the solution of row 3, whatever the environment says
    ("double", "x*2", False),  # succeeds: its own solution
    ("square", "x*2", True),  # fails, and nobody solved it: the outcome of its tests alone
    ("square", "x+3", False),  # fails, and there is nothing to read
]
BELIEF = 6.0  # how much likelier, in nats, a program becomes that agrees with what the teacher read


def run(program: str, x: int) -> int:
    """Interpret `x`, an operation, and a digit or `x`."""
    left, operation, operand = program
    if left != "x" or (operand != "x" and not operand.isdigit()):
        raise ValueError(f"{program!r} is not a program.")
    right = x if operand == "x" else int(operand)
    return {"+": x + right, "-": x - right, "*": x * right}[operation]


def outcome(question: str, program: str) -> dict[int, tuple[int, int]]:
    """The failed unit tests: input -> (what came out, what was expected)."""
    results = {x: (run(program, x), expected) for x, expected in TESTS[question].items()}
    return {x: pair for x, pair in results.items() if pair[0] != pair[1]}


def agrees(program: str, solution: str | None, failures: dict[int, tuple[int, int]]) -> bool:
    """What the teacher makes of it: the shown program, or else all that would have passed the failed tests."""
    if solution is not None:
        return program == solution
    return bool(failures) and all(run(program, x) == expected for x, (_, expected) in failures.items())


def main(steps: int = 200, learning_rate: float = 2.0) -> dict:
    """Route, train, print; return what was shown."""
    failures = [outcome(question, program) for question, program, _ in ATTEMPTS]
    success = torch.tensor([not failed for failed in failures])
    rich = torch.tensor([shown and bool(failed) for (_, _, shown), failed in zip(ATTEMPTS, failures, strict=True)])
    questions = torch.tensor([list(TESTS).index(question) for question, _, _ in ATTEMPTS])
    solutions, available = select_feedback(questions, success, rich)

    print("attempt            passed  reads")
    hints: list[tuple[str | None, dict[int, tuple[int, int]]]] = []
    for row, (question, program, _) in enumerate(ATTEMPTS):
        source = int(solutions[row])
        hints.append((ATTEMPTS[source][1], {}) if source >= 0 else (None, failures[row] if rich[row] else {}))
        told = " ".join(f"f({x})={got}, not {expected};" for x, (got, expected) in hints[row][1].items())
        reads = f"{hints[row][0]} (row {source})" if source >= 0 else told or "nothing: not trained"
        print(f"{row} {question:>8}: {program}   {'yes' if success[row] else 'no ':6}  {reads}")

    torch.manual_seed(0)
    student = torch.randn(len(ATTEMPTS), 1, len(PROGRAMS), requires_grad=True)  # (B, T, V): a program is one token
    reading = torch.tensor([[[BELIEF * agrees(program, *hint) for program in PROGRAMS]] for hint in hints])
    teacher = student.detach() + reading
    before = student.detach().softmax(-1).squeeze(1)  # (B, V)
    mask = torch.ones(len(ATTEMPTS), 1, dtype=torch.bool)
    optimizer = torch.optim.SGD([student], lr=learning_rate)
    losses = []
    for _ in range(steps):
        loss = feedback_reverse_kl(student, teacher, mask, available)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = student.detach().softmax(-1).squeeze(1)

    right = torch.tensor([[not outcome(question, program) for program in PROGRAMS] for question, _, _ in ATTEMPTS])
    solved_before, solved_after = (before * right).sum(-1).tolist(), (after * right).sum(-1).tolist()
    untouched = torch.equal(before[-1], after[-1])
    print(f"\nloss {losses[0]:.4f} -> {losses[-1]:.6f} in {steps} steps\nprobability of a right program:")
    for row, (old, new) in enumerate(zip(solved_before, solved_after, strict=True)):
        print(f"{row} {ATTEMPTS[row][0]:>8}: {old:.3f} -> {new:.3f}")
    print(f"The last attempt's distribution is bit-identical: {untouched}")
    return {
        "solutions": solutions.tolist(), "available": available.tolist(), "losses": losses, "before": before,
        "after": after, "solved_before": solved_before, "solved_after": solved_after, "untouched": untouched,
    }  # fmt: skip


if __name__ == "__main__":
    main()
