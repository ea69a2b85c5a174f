"""
Runs that die, for test_faults.py: `python fault_worker.py FOLDER FAULT...`, all forked from this one process.

Each run trains eight steps with a checkpoint at every second. FAULT: `none`; `step` (SIGKILL in step 6), `weights`
(with half of checkpoint-4's weights on the disk), `teacher` (half of its teacher), `state` (half of its last file):
after these four the run is resumed; `sweep` (killed again and again, and resumed, until it ends); `hang` (a reward
function that never returns). Each leaves FOLDER/FAULT/, and what happened in FOLDER/FAULT.json and FOLDER/FAULT*.txt.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import peft.peft_model
import safetensors.torch
import tiny
import torch
from transformers import TrainerCallback, TrainerState

import sdpo_trl.store
from sdpo_trl.checkpoints import last_complete


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DieInAStep(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 5:
            die()


def dies_while_writing(name):
    """`save_file` that dies with half of the file on the disk."""

    def save_file(tensors, path, *args, **kwargs):
        plain(tensors, path, *args, **kwargs)
        if "checkpoint-4" in str(path) and name in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    plain = safetensors.torch.save_file
    return save_file


def dies_at_the_state(self, path):
    if "checkpoint-4" in str(path):
        Path(path).write_text('{"global_st')
        die()
    SAVE_STATE(self, path)


SAVE_STATE = TrainerState.save_to_json


def hanging(completions, **kwargs):
    while True:
        time.sleep(0.05)


def train(folder, fault, resume):
    reward, options = tiny.telling(), {}
    if fault == "step":
        options["trainer_callbacks"] = [DieInAStep()]
    elif fault == "weights":
        peft.peft_model.safe_save_file = dies_while_writing("adapter_model")
    elif fault == "teacher":
        sdpo_trl.store.save_file = dies_while_writing("sdpo_teacher")
    elif fault == "state":
        TrainerState.save_to_json = dies_at_the_state
    elif fault == "hang":
        reward, options["reward_timeout"] = hanging, 1.0
    torch.manual_seed(0)
    trainer = tiny.trainer(
        folder, reward, trainer_peft_config=tiny.lora(), max_steps=8, save_strategy="steps", save_steps=2,
        data=tiny.prompts(16), **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    tensors = {**tiny.trained(trainer.model), **{f"teacher.{k}": v for k, v in trainer._stores["teacher"].whole()}}
    torch.save({"step": trainer.state.global_step, "tensors": tensors}, folder / "end.pt")


def start(output, folder, fault, resume=False):
    """A child of its own, its output in a file; returns its process id."""
    child = os.fork()
    if child:
        return child
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        train(folder, fault, resume)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)  # through Python's own end, which an abandoned thread must not hold up
    sys.exit(0)


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def last(folder):
    path, passed = last_complete(str(folder))
    return {
        "last": path and path.name,
        "passed": [each.name for each in passed],
        "files": {each.name: each.read_bytes().hex() for each in sorted(path.iterdir())} if path else {},
    }


def changed(folder):
    return folder.stat().st_mtime_ns if folder.exists() else None


def sweep(root):
    """
    Kill a run a little later each time, counted from the moment when a new checkpoint begins to be written, until it
    is whole.
    """
    folder, seen, tries, reached = root / "sweep", [], 0, None
    for kill in range(80):
        before = last(folder)["last"]
        if before == "checkpoint-8":
            return seen
        tries, reached = (tries + 1 if before == reached else 0), before
        step = int(before.split("-")[1]) if before else 0
        following = folder / f"checkpoint-{step + 2}"
        touched = changed(following)
        child = start(root / f"sweep-{kill}.txt", folder, "none", resume=before is not None)
        while changed(following) == touched:
            if os.waitpid(child, os.WNOHANG)[0]:
                return seen
            time.sleep(0.0005)
        time.sleep(0.003 * tries**1.5)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.append([step, last(folder)["last"], last(folder)["passed"]])
    return seen


def main(root, *faults):
    root = Path(root)
    for fault in faults:
        folder = root / fault
        if fault == "sweep":
            folder.mkdir()
            result = sweep(root)
        else:
            result = {"code": code_of(start(root / f"{fault}.txt", folder, fault)), "killed": last(folder)}
            if fault not in ("none", "hang"):
                result["again"] = code_of(start(root / f"{fault}-again.txt", folder, "none", resume=True))
                kept = folder / (result["killed"]["last"] or "")
                result["intact"] = last(folder)["last"] == "checkpoint-8" and {
                    each.name: each.read_bytes().hex() for each in sorted(kept.iterdir())
                } == result["killed"].pop("files")
        (root / f"{fault}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
