"""A teacher of which a server told a few log-probabilities per token, in the place of a head that computes them all.

Knows: log-probabilities. Deliberately does not know: servers, requests.
"""

from dataclasses import dataclass

import torch

_SMALLEST = 1e-37  # keeps the logarithm of a rest that rounding has emptied finite


@dataclass(frozen=True)
class ServedHead:
    """
    What is known about `n` scored tokens. All other items share the rest of the probability evenly.

    Only what the items told do not depend on is meaningful: the divergence of a sampled token, or over the teacher's
    own `K` items with a tail or renormalised. The entropy is not.

    Args:
        token_ids (`torch.Tensor`): int64 of shape `(n,)`, the sampled tokens.
        token_log_probs (`torch.Tensor`): Shape `(n,)`, finite.
        support (`torch.Tensor`): int64 of shape `(n, K)`: the teacher's likeliest items, each once, `1 <= K <= V`.
        log_probs (`torch.Tensor`): Shape `(n, K)`.
        vocab_size (`int`): `V`.
    """

    token_ids: torch.Tensor
    token_log_probs: torch.Tensor
    support: torch.Tensor
    log_probs: torch.Tensor
    vocab_size: int
    bias: None = None

    def detach(self) -> "ServedHead":
        return self

    def logits(self, vocab_size: int) -> torch.Tensor:
        """Log-probabilities over all `vocab_size` items, `(n, V)`; their logarithmic softmax is themselves."""
        out = self.log_probs.new_empty(self.token_ids.numel(), vocab_size)
        return self.logits_into(slice(0, self.token_ids.numel()), out)

    def logits_into(self, tokens: slice, out: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        """See [`~sdpo_trl.heads.TokenHead.logits_into`]."""
        ids, support = self.token_ids[tokens, None], self.support[tokens]
        told = self.log_probs[tokens].double().exp().sum(-1, keepdim=True)
        apart = ~(support == ids).any(-1, keepdim=True)  # a sampled token that is not among the likeliest
        own = self.token_log_probs[tokens, None]
        told = told + torch.where(apart, own.double().exp(), 0.0)
        others = out.size(1) - support.size(1) - apart.int()
        share = ((1.0 - told) / others.clamp(min=1)).clamp(min=_SMALLEST).log()
        out.copy_(share.expand_as(out))
        out.scatter_(-1, support, self.log_probs[tokens].to(out.dtype))
        return out.scatter_(-1, ids, own.to(out.dtype))
