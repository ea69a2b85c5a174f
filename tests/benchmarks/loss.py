"""The loss alone, with a frozen output matrix: time against peers and against its matrix products, peak memory.

python tests/benchmarks/loss.py [--quick] [--out FOLDER]
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import measure  # noqa: E402
import torch  # noqa: E402

from sdpo_trl.divergence import DivergenceSpec  # noqa: E402
from sdpo_trl.heads import TokenHead  # noqa: E402
from sdpo_trl.scores import ScoreRequest, score_tokens  # noqa: E402


def inputs(n: int, hidden: int, vocab: int):
    torch.manual_seed(0)
    weight = torch.randn(vocab, hidden) / math.sqrt(hidden)
    teacher_weight = weight + 0.1 * torch.randn(vocab, hidden) / math.sqrt(hidden)
    states = [torch.randn(n, hidden) * 3 for _ in range(2)]
    return states[0].requires_grad_(), weight, states[1], teacher_weight, torch.randint(0, vocab, (n,))


def ours(case, implementation="fused"):
    h, w, t, wt, ids = inputs(case["n"], case["H"], case["V"])
    topk = case["k"]
    spec = DivergenceSpec("topk_logits" if topk else "full_logits", case["alpha"], topk)
    request = ScoreRequest(ids, spec, torch.full((case["n"],), 1 / case["n"]))

    def call():
        h.grad = None
        score_tokens(TokenHead(h, w), TokenHead(t, wt), request, implementation).loss.backward()

    return call


def naive(case):
    """The formula as one writes it down."""
    h, w, t, wt, _ = inputs(case["n"], case["H"], case["V"])
    alpha, k = case["alpha"], case["k"]

    def call():
        h.grad = None
        s = torch.log_softmax(h @ w.T, -1)
        with torch.no_grad():
            q = torch.log_softmax(t @ wt.T, -1)
        if k:
            index = s.detach().topk(k).indices
            s, q = s.gather(-1, index), q.gather(-1, index)
            s = torch.cat([s, torch.log(-torch.expm1(s.logsumexp(-1, True).clamp(max=-1e-7)))], -1)
            q = torch.cat([q, torch.log(-torch.expm1(q.logsumexp(-1, True).clamp(max=-1e-7)))], -1)
        if alpha == 0:
            value = (q.exp() * (q - s)).sum(-1)
        elif alpha == 1:
            value = (s.exp() * (s - q)).sum(-1)
        else:
            m = torch.logaddexp(s + math.log(1 - alpha), q + math.log(alpha))
            value = (1 - alpha) * (s.exp() * (s - m)).sum(-1) + alpha * (q.exp() * (q - m)).sum(-1)
        value.mean().backward()

    return call


def trl_sdpo(case):
    """TRL's experimental SDPO loss on both models' logits."""
    from trl.experimental.sdpo import loss_utils

    h, w, t, wt, _ = inputs(case["n"], case["H"], case["V"])

    def call():
        h.grad = None
        student = h @ w.T
        with torch.no_grad():
            teacher = t @ wt.T
        if case["k"]:
            value = loss_utils.compute_topk_self_distillation_loss(
                student, teacher, distillation_topk=case["k"], distillation_alpha=case["alpha"],
                distillation_add_tail=True,
            )  # fmt: skip
        else:
            value = loss_utils.compute_full_logit_self_distillation_loss(
                student, teacher, distillation_alpha=case["alpha"]
            )
        value.mean().backward()

    return call


def trl_chunked(case):
    """TRL's chunked kernel (full vocabulary only)."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    h, w, t, wt, _ = inputs(case["n"], case["H"], case["V"])

    def call():
        h.grad = None
        ChunkedDivergenceFunction.apply(h, w, None, t, wt, None, case["alpha"])[0].mean().backward()

    return call


def floor(case):
    """The three matrix products alone, in our chunks."""
    from sdpo_trl.fused import chunk_length

    h, w, t, wt, _ = inputs(case["n"], case["H"], case["V"])
    chunk = chunk_length(case["n"], case["V"], 4, h.device)
    a, b = torch.empty(chunk, case["V"]), torch.empty(chunk, case["V"])
    out = torch.empty(case["n"], case["H"])

    def call():
        with torch.no_grad():
            for start in range(0, case["n"], chunk):
                rows = slice(start, min(start + chunk, case["n"]))
                size = rows.stop - start
                torch.mm(h[rows], w.t(), out=a[:size])
                torch.mm(t[rows], wt.t(), out=b[:size])
                torch.mm(a[:size], w, out=out[rows])

    return call


CONTENDERS = {"ours": ours, "naive": naive, "trl_sdpo": trl_sdpo, "trl_chunked": trl_chunked, "floor": floor}


def fits(name: str, case) -> bool:
    """Whether a contender can run: full logits in this machine's memory, and the kernel that has no top-k."""
    if name == "trl_chunked" and case["k"]:
        return False
    return name in ("ours", "floor", "trl_chunked") or case["n"] * case["V"] * 4 * 14 < 18e9


def cases(quick: bool):
    for hidden, vocab in ((576, 49152), (1024, 151936)):
        for n in (256, 1024, 4096, 16384):
            for alpha in (0.0, 0.5, 1.0):
                for k in (None, 100):
                    if quick and (n > 1024 or vocab > 49152 or alpha == 0.0):
                        continue
                    yield {"n": n, "H": hidden, "V": vocab, "alpha": alpha, "k": k}


def rounds_for(case) -> int:
    return max(2, min(7, int(2e11 / (case["n"] * case["V"] * case["H"] * 6))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the cases that docs/speed.md quotes")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--only", nargs="+", metavar="N:V", help="only these sizes, say 16384:49152")
    parser.add_argument("--seconds", type=float, default=60.0, help="leave out cases whose products alone take longer")
    parser.add_argument("--peak", nargs=2, metavar=("CONTENDER", "CASE"))
    options = parser.parse_args()
    measure.prepare()
    if options.peak:
        case = json.loads(options.peak[1])
        CONTENDERS[options.peak[0]]({**case, "n": 16})()  # libraries loaded, buffers of the allocator warm
        print(measure.peak_of(CONTENDERS[options.peak[0]](case)))
        return
    rows = []
    for case in cases(options.quick):
        if options.only and f"{case['n']}:{case['V']}" not in options.only:
            continue
        if case["n"] * case["V"] * case["H"] * 6 / 1.2e11 > options.seconds:
            continue
        names = [name for name in CONTENDERS if fits(name, case)]
        times = measure.interleave({name: CONTENDERS[name](case) for name in names}, rounds_for(case))
        row = {**case, "k": case["k"] or "full", "ours_s": times["ours"]}
        row.update({f"/{name}": times["ours"] / times[name] for name in names[1:]})
        for name in names[:-1]:
            peak = measure.peak_in_process(__file__, name, json.dumps(case))
            row[f"{name}_MB"] = round(peak / 1e6, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
    measure.publish("loss", rows, options.out)


if __name__ == "__main__":
    main()
