"""A session that is killed and goes on from its journal until so many updates are made.

Each episode has fixed words and denied answers, so a session that was killed anywhere and continued must end with the
same conversation, weights and teacher as one that was not. `python online_worker.py` reads `FOLDER<tab>UPDATES` lines.
"""

import hashlib
import os
import sys
from pathlib import Path

import talk
import tiny
import torch
from talk import FAILING, PLAIN

from sdpo_trl.online import conversation


def scripted(trainer, prompt_ids, count, on_text=None):
    """An answer that depends on the prompt alone."""
    number = sum(prompt_ids) % 3
    ids = tiny.answer_ids(trainer._tokenizer, [PLAIN, FAILING, f"text {number}$"][number])
    return [(ids, trainer.log_probs([(prompt_ids, ids)])[0])] * count


def act(session, goal: int) -> None:
    """The next thing that the state alone asks for, until `goal` updates are made and the conversation is cleared."""
    while session.updates < goal or len(session.messages) > 1:
        last, learned = session.messages[-1], session.updates
        if session.pending is not None:
            number = len(session.attempts)
            session.deny(f"wrong {number}", solution="better" if number else None)
        elif last["role"] != "user":
            session.say(f"task {learned}")
        elif (task := int(last["content"].removeprefix("task "))) < learned:
            if task % 3 == 1:
                session.save(session.trainer.args.output_dir + "/saved")
            session.clear()
        elif len(session.attempts) < 1 + task % 2:
            session.respond()
        else:
            session.learn()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    joined = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(joined).hexdigest()[:16]


def live(folder: Path, goal: int) -> dict:
    """Go on from the journal in a folder, or begin it; what the session ended with."""
    with talk.session(folder, session_journal=folder / "journal.jsonl", learning_rate=3e-3) as session:
        act(session, goal)
        moments = session.trainer.optimizer.state_dict()["state"]
        stores = {f"{n}.{k}": v for n, s in session.trainer._stores.items() for k, v in s.whole()}
        return {
            "weights": digest(tiny.trained(session.trainer.model)), "teacher": digest(stores),
            "step": session.trainer.state.global_step, "state": session._state.record(),
            "moments": digest({str(i): v["exp_avg"] for i, v in moments.items()}),
        }  # fmt: skip


def main() -> None:
    """One life per line of standard input, in a process of its own: prints its id, and then how it ended."""
    torch.set_num_threads(1)
    conversation.sample = scripted
    for line in sys.stdin:
        folder, goal = line.rstrip("\n").split("\t")
        pid = os.fork()  # nothing is imported anew
        if pid == 0:
            code = 1
            try:
                live(Path(folder), int(goal))
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
