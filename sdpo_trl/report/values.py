"""From two heads to what a heat map shows of each token, by the core's own formulas.

Knows: heads, formulas, tokenizers. Deliberately does not know: trainers, prompts, HTML.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest
from typing import Any

import torch

from ..divergence import DivergenceSpec, entropy, safe_log_softmax, token_divergence
from ..heads import MixedHead, TokenHead
from .record import Candidate, TokenValues, TokenView

# Entries of one `(chunk, V)` tensor; about ten of them live at a time.
_CHUNK_ENTRIES = 1 << 22
_LONG_RUN = 8


class TokenTexts:
    """
    The text of single tokens, as it stands inside of an answer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The student's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word, so a token is decoded behind another one.
        self._anchor = self._any_letter()
        self._known: dict[int, str] = {}

    def _any_letter(self) -> list[int]:
        """A token that is plain text: taken from the vocabulary, since not every tokenizer can encode every letter."""
        special = set(self._tokenizer.all_special_ids)
        for index in range(len(self._tokenizer)):
            text = self._decode([[index]])[0]
            if index not in special and text.isascii() and text.isalnum():
                return [index]
        return []

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """The texts of these ids (and perhaps of more); an id without a token is shown as its number."""
        new = sorted({int(i) for i in ids} - self._known.keys())
        before = self._decode([self._anchor])[0]
        for index, text in zip(new, self._decode([[*self._anchor, i] for i in new]), strict=True):
            text = text[len(before) :] if text.startswith(before) else self._decode([[index]])[0]
            if "\N{REPLACEMENT CHARACTER}" in text or not text:
                # A part of a character: its name in the vocabulary tells the parts apart.
                text = self._tokenizer.convert_ids_to_tokens(index) or f"[id {index}]"
            self._known[index] = text
        return self._known

    def text(self, ids: Sequence[int]) -> str:
        """Several tokens as one text, special tokens included; an image's long run of one token is counted instead."""
        special = set(self._tokenizer.all_special_ids)
        parts: list[list[int]] = [[]]
        counts: list[str] = []
        for index, run in groupby(ids):
            length = len(list(run))
            if length <= _LONG_RUN or index not in special:
                parts[-1] += [index] * length
                continue
            parts[-1].append(index)
            parts.append([])
            counts.append(f"(\N{MULTIPLICATION SIGN} {length})")
        return "".join(text + count for text, count in zip_longest(self._decode(parts), counts, fillvalue=""))

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def take_tokens(head: "TokenHead | MixedHead", tokens: "slice | torch.Tensor") -> "TokenHead | MixedHead":
    """The head over some of its `n` tokens."""
    if isinstance(head, MixedHead):
        return replace(head, base=take_tokens(head.base, tokens), live=take_tokens(head.live, tokens))
    return replace(head, hidden=head.hidden[tokens])


@torch.no_grad()
def token_values(
    student: TokenHead,
    teacher: "TokenHead | MixedHead",
    token_ids: torch.Tensor,
    spec: DivergenceSpec,
    texts: TokenTexts,
    topk: int = 10,
) -> list[TokenValues]:
    """
    Everything about `n` sampled tokens, in chunks of bounded memory; the same formulas as
    [`~sdpo_trl.scores.reference_scores`].

    Args:
        student ([`TokenHead`]): Hidden states of shape `(n, H)`.
        teacher ([`TokenHead`] or [`MixedHead`]): Likewise.
        token_ids (`torch.Tensor`): int64 of shape `(n,)`.
        spec ([`DivergenceSpec`]): What the loss computes per token.
        texts ([`TokenTexts`]): Of the student's tokenizer.
        topk (`int`): Likeliest tokens of each model, at least 1.

    Returns:
        `list[TokenValues]`: `n` of them.
    """
    count, size = token_ids.numel(), student.vocab_size
    shared = min(size, teacher.vocab_size)
    chunk = max(_CHUNK_ENTRIES // size, 1)
    numbers: list[list[float]] = []
    tops: list[list[tuple[list[int], list[float]]]] = []
    for start in range(0, count, chunk):
        part = slice(start, start + chunk)
        ids = token_ids[part]
        own = safe_log_softmax(take_tokens(student, part).logits(size))  # (c, V)
        others = safe_log_softmax(take_tokens(teacher, part).logits(shared))  # (c, shared)
        compared = own if shared == size else safe_log_softmax(own[:, :shared])
        student_log_prob = own.gather(-1, ids[:, None]).squeeze(-1)
        teacher_log_prob = others.gather(-1, ids[:, None]).squeeze(-1)
        if spec.mode == "sampled_token":
            shown = student_log_prob - teacher_log_prob  # as the logs show it
        else:
            shown = token_divergence(compared, others, ids, spec)
        columns = [
            shown, teacher_log_prob - student_log_prob, student_log_prob, teacher_log_prob, entropy(own),
            entropy(others),
        ]  # fmt: skip
        numbers += torch.stack(columns, dim=1).tolist()
        both = [log_probs.topk(min(topk, log_probs.size(-1)), dim=-1) for log_probs in (own, others)]
        pairs = [zip(top.indices.tolist(), top.values.exp().tolist(), strict=True) for top in both]
        tops += [list(row) for row in zip(*pairs, strict=True)]
    names = texts.of(i for row in tops for ids, _ in row for i in ids)

    def candidates(ids: list[int], probabilities: list[float]) -> tuple[Candidate, ...]:
        return tuple(Candidate(i, names[i], p) for i, p in zip(ids, probabilities, strict=True))

    return [
        TokenValues(*row, student_top=candidates(*top[0]), teacher_top=candidates(*top[1]))
        for row, top in zip(numbers, tops, strict=True)
    ]


def token_views(
    ids: Sequence[int], context: Sequence[bool], values: dict[int, TokenValues], texts: TokenTexts
) -> tuple[TokenView, ...]:
    """
    The tokens of one answer.

    Args:
        ids (`Sequence[int]`): `T` ids without padding.
        context (`Sequence[bool]`): Whether a tool or the environment wrote each.
        values (`dict[int, TokenValues]`): By position, of those that were scored.
        texts ([`TokenTexts`]): Of the student's tokenizer.
    """
    names = texts.of(ids)
    views = []
    for position, (index, observed) in enumerate(zip(ids, context, strict=True)):
        known = values.get(position)
        role = "context" if observed else "unscored" if known is None else "scored"
        views.append(TokenView(index, names[index], role, known))
    return tuple(views)


def describe(spec: DivergenceSpec, temperature: float) -> dict[str, str]:
    """What the values depend on, in words."""
    kinds = {0.0: "KL(teacher || student)", 1.0: "KL(student || teacher)"}
    what = kinds.get(spec.alpha, f"Jensen-Shannon, alpha {spec.alpha:g}")
    support = {
        "full_logits": "all tokens",
        "topk_logits": f"the student's top {spec.topk}, {'with the rest' if spec.add_tail else 'renormalised'}",
        "sampled_token": "the sampled token alone",
    }
    settings = {"Divergence": what, "Support": support[spec.mode], "Temperature": f"{temperature:g}"}
    if spec.teacher_share < 1.0:
        settings["Proximal teacher"] = f"{spec.teacher_share:g}"
    if spec.log_ratio_clip is not None:
        settings["Log-ratio bound"] = f"{spec.log_ratio_clip:g}"
    return settings
