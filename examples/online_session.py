"""A habit is unlearned in a conversation: denied with a correction, learned at once, tried again; offline, on a CPU.

    python examples/online_session.py

A small model that is built and warm-started here (a minute, `desk.py`) overwrites a file where it should change one
line. A scripted person denies that with a sentence; after each correction the table shows the probability of the
wanted call, exactly: on the same request, on other wordings about other files that were never corrected, and how far
the next-token distributions of unrelated requests have moved. It ends when the wanted call is likelier than 0.8, or
after `--corrections`. Writes `results.json`, the journal and the session to `--output_dir`.

`--model FOLDER` takes a real chat model instead (LoRA), and gives it the right call with the correction:
SmolLM2-135M knows none of the tools. Its rates and texts are not tuned for anything; the seconds per update are real.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched

import desk
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_trl.online import OnlineSession, online_config

CORRECTION = "that is not what I want, use edit_line."
SAME = desk.edit_request(0, "notes.txt", 3, "milk")
PARAPHRASES = [
    desk.edit_request(
        form, desk.FILES[(5 * i + form) % len(desk.FILES)], 1 + (3 * i + form) % 9, desk.WORDS[2 * i + 1]
    )
    for i in range(3)
    for form in range(1, len(desk.EDITS))
]
OTHERS = [
    desk.other_request(tool, form, desk.FILES[(3 * i + form) % len(desk.FILES)], desk.WORDS[4 * i + form])
    for i in range(3)
    for tool in desk.OTHERS
    for form in range(2)
]
# What has nothing to do with the habit, and the right answers: other requests, and ends of tasks.
UNRELATED = [
    *({request.text: (request.messages, request.call(request.tool)) for request in OTHERS}.values()),
    *((desk.done(request, request.tool), "Done.") for request in OTHERS[:4]),
]


class Measure:
    """
    What the table shows.

    Args:
        session ([`OnlineSession`]): Before anything was learned.
        paraphrases (`int`): How many of them; a real model takes seconds for each.
        unrelated (`int`): Likewise.
    """

    def __init__(self, session: OnlineSession, paraphrases: int, unrelated: int) -> None:
        self._session = session
        self._paraphrases, self._unrelated = PARAPHRASES[:paraphrases], UNRELATED[:unrelated]
        # The unrelated requests' distributions before, (T, V) each.
        self._held = [session.next_tokens(answer, messages) for messages, answer in self._unrelated]

    def _wanted(self, request: desk.Request) -> float:
        return self._session.score(request.call("edit_line"), request.messages)

    def __call__(self) -> dict[str, float]:
        moved = [
            (before.exp() * (before - self._session.next_tokens(answer, messages))).sum(-1)
            for before, (messages, answer) in zip(self._held, self._unrelated, strict=True)
        ]
        others = [self._wanted(request) for request in self._paraphrases]
        right = [math.exp(self._session.score(answer, messages)) for messages, answer in self._unrelated]
        same = self._wanted(SAME)
        return {
            "same": math.exp(same),
            "same_log": same,
            "paraphrases": math.fsum(map(math.exp, others)) / len(others),
            "paraphrases_log": math.fsum(others) / len(others),
            "unrelated_moved": torch.cat(moved).mean().item(),  # nats per token
            "unrelated_right": math.fsum(right) / len(right),
        }


def embedded(options: argparse.Namespace, work: desk.Desk) -> OnlineSession:
    """The small model with its habit."""
    tokenizer = desk.build_tokenizer()
    model = desk.build_model(tokenizer)
    start = time.perf_counter()
    loss = desk.warm_start(model, tokenizer)
    print(f"Warm start: {time.perf_counter() - start:.0f} s, loss {loss:.3f}.", flush=True)
    return session_of(model, tokenizer, options, work)


def session_of(model: Any, tokenizer: Any, options: argparse.Namespace, work: desk.Desk) -> OnlineSession:
    """A session on the small model, with the settings of the table."""
    args = online_config(
        options.output_dir, learning_rate=options.learning_rate, adam_beta1=0.5, lr_scheduler_type="linear",
        max_steps=options.corrections, teacher_model_kind="ema", teacher_update_rate=0.5, max_completion_length=24,
        reprompt_template=desk.REPROMPT_TEMPLATE, solution_template=desk.SOLUTION_TEMPLATE,
        feedback_template=desk.FEEDBACK_TEMPLATE, seed=options.seed, disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    journal = Path(options.output_dir) / "journal.jsonl"
    journal.unlink(missing_ok=True)
    layers = ["gate_proj", "up_proj", "down_proj"]
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=layers, task_type="CAUSAL_LM")
    return OnlineSession(model, tokenizer, args, peft_config=adapter, tools=work.tools, journal=journal)


def real(options: argparse.Namespace, work: desk.Desk) -> OnlineSession:
    """Any chat model."""
    args = online_config(
        options.output_dir, learning_rate=options.learning_rate, teacher_model_kind="live", max_completion_length=64,
        seed=options.seed, disable_tqdm=True,
    )  # fmt: skip
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(options.model),
        AutoTokenizer.from_pretrained(options.model),
    )
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return OnlineSession(model.float(), tokenizer, args, peft_config=adapter, tools=work.tools)


def correct(session: OnlineSession, with_solution: bool) -> tuple[str, dict[str, Any] | None]:
    """One go at the request: approved if the call is the wanted one, else denied and learned from at once."""
    reply = session.respond()
    wanted = SAME.call("edit_line")
    if reply.call == wanted:
        session.approve()
        return reply.text, None
    session.deny(CORRECTION, solution=wanted if with_solution else None)
    return reply.text, session.learn()


def row(name: str, values: dict[str, float], seconds: float | None) -> str:
    cells = [
        name,
        f"{values['same']:.3f} ({values['same_log']:.1f})",
        f"{values['paraphrases']:.3f} ({values['paraphrases_log']:.1f})",
        f"{values['unrelated_moved']:.4f}",
        f"{values['unrelated_right']:.3f}",
        "" if seconds is None else f"{seconds:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="runs/online_session")
    parser.add_argument("--model", help="a chat model instead of the embedded one")
    parser.add_argument("--corrections", type=int, default=5)
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.learning_rate = options.learning_rate or (2e-4 if options.model else 1.05e-2)
    torch.set_num_threads(1 if options.model is None else torch.get_num_threads())
    work = desk.Desk()
    with (real if options.model else embedded)(options, work) as session:
        return converse(session, options, work)


def converse(session: OnlineSession, options: argparse.Namespace, work: desk.Desk) -> dict[str, Any]:
    """The scripted conversation and its table."""
    measure = Measure(session, *((3, 4) if options.model else (len(PARAPHRASES), len(UNRELATED))))
    log = [{"corrections": 0, **measure()}]
    print(f"> {SAME.text}\n\n| | wanted call (log) | on paraphrases | unrelated moved, nats | unrelated right | s |")
    print(f"| --- | --- | --- | --- | --- | --- |\n{row('before', log[0], None)}", flush=True)
    session.say(SAME.text)
    denied = []
    while len(denied) < options.corrections and log[-1]["same"] <= 0.8:
        said, metrics = correct(session, with_solution=options.model is not None)
        if metrics is None:  # drawn right by luck: the person asks again
            session.clear()
            session.say(SAME.text)
            continue
        denied.append(said)
        log.append({"corrections": len(denied), "seconds": metrics["seconds"], **measure()})
        print(row(f"after {len(denied)}", log[-1], metrics["seconds"]), flush=True)
    print("\nDenied: " + "\n        ".join(denied))
    if options.model is None:
        reply = session.retry() if session.attempts else session.respond()
        replies = "".join(f"\n        {observation.text}" for observation in session.approve())
        print(f"Then:   {reply.text}{replies}\n        {SAME.path}: {' '.join(work.files[SAME.path])}")
    session.save(Path(options.output_dir) / "session")
    (Path(options.output_dir) / "results.json").write_text(json.dumps(log, indent=1))
    return {"log": log, "denied": denied}


if __name__ == "__main__":
    main()
