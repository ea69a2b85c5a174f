"""
What each of two processes does for test_fault_pairs.py: `torchrun ... fault_pair_worker.py FOLDER FAULT BACKEND...`.

FAULT: `gradient` (process 1's loss is NaN in the second step; the run is then resumed from its folder), `reward` (the
reward function of process 1 dies in the second step).
"""

import os
import sys
from pathlib import Path

import matrix_worker
import torch
import torch.distributed as dist
from matrix_worker import RANK, WeightStore


def break_the_gradient(trainer):
    plain = trainer._compute_loss

    def broken(model, inputs):
        loss = plain(model, inputs)
        return loss * float("nan") if RANK == 1 and trainer.state.global_step == 1 else loss

    trainer._compute_loss = broken


def kill_the_reward(trainer):
    plain = trainer.reward_funcs[0]

    def reward(**given):
        if RANK == 1 and trainer.state.global_step == 1:
            raise OSError("the grader is gone")
        return plain(**given)

    trainer.reward_funcs[0] = reward


def finite(trainer):
    return all(bool(value.isfinite().all()) for _, value in WeightStore(trainer.model).whole())


def run(folder, fault, backend):
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    trainer = matrix_worker.build(folder, backend, "lora", "ema")
    trainer.args.save_steps = 1
    {"gradient": break_the_gradient, "reward": kill_the_reward}[fault](trainer)
    error = None
    try:
        trainer.train()
    except FloatingPointError as caught:
        error = str(caught)
    again = matrix_worker.build(folder, backend, "lora", "ema")
    chosen = again._whole_checkpoint()
    again.args.max_steps = 5
    again.train(resume_from_checkpoint=True)
    result = {
        "error": error,
        "finite": error is not None or finite(trainer),
        "as_asked": matrix_worker.is_as_asked(trainer, backend),
        "chosen": Path(chosen).name,
        "again": (again.state.global_step, finite(again)),
    }
    torch.save(result, folder / f"{fault}-{RANK}.pt")
    dist.barrier()


def main(folder, fault, backends):
    if any(backend.startswith("zero") for backend in backends):
        import deepspeed

        deepspeed.init_distributed("gloo")
    matrix_worker.shard_on_the_cpu()
    for backend in backends:
        run(folder / backend, fault, backend)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
