"""A vLLM server in this process: TRL's own client, whose requests a model answers that has what was sent to it alone.

It stands for the server at the level of HTTP bodies, so TRL's payloads and parsing are part of what is tested.
"""

import copy
from typing import Any

import torch
from trl.generation import vllm_client, vllm_generation


class FakeServer:
    """
    Args:
        model (`transformers.PreTrainedModel`): The server's own, of the base model's class; its weights are scrambled,
            so that an answer is right only if they were sent.
        noise (`float`): How far the reported log-probabilities of sampled tokens are off, at every other token.
    """

    def __init__(self, model: Any, noise: float = 0.0, **config: Any) -> None:
        self.model = copy.deepcopy(model).eval()
        for p in self.model.parameters():
            p.data.normal_()
        self.noise = noise
        self.config = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1, **config}
        self.sent: list[dict[str, torch.Tensor]] = []
        self.announced: list[list[tuple[str, str, list[int]]]] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.resets = 0

    def install(self, monkeypatch: Any) -> "FakeServer":
        """Every client that TRL makes from now on talks to this server."""
        server = self

        class Client(vllm_client.VLLMClient):
            def __init__(self, base_url=None, **options):
                self.base_url, self.model, self.options = base_url, "fake", options

            def get_server_info(self):
                return {"model_config": server.config, "weight_transfer_config": {}}

            def init_communicator(self, device=0):
                pass  # NCCL

            def update_named_params(self, metadata, named_params):
                server.receive(metadata, {name: p.detach().clone() for name, p in named_params})

            def reset_prefix_cache(self):
                server.resets += 1

            def _post(self, url, **body):
                return server.answer(url.removeprefix(self.base_url), body["json"])

        monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *args, **kwargs: True)
        monkeypatch.setattr(vllm_client, "VLLMClient", Client)
        monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
        return self

    def receive(self, metadata: list[tuple[str, str, list[int]]], tensors: dict[str, torch.Tensor]) -> None:
        self.announced.append(metadata)
        self.sent.append(tensors)
        known = dict(self.model.named_parameters())
        assert tensors.keys() == known.keys()
        for name, dtype, shape in metadata:
            assert (str(tensors[name].dtype), list(tensors[name].shape)) == (f"torch.{dtype}", shape)
        with torch.no_grad():
            for name, p in known.items():
                p.copy_(tensors[name])

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """Of each position's next token, without temperature, as vLLM gives for a prompt: `(len(ids), V)`."""
        return self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        assert route == "/v1/completions"
        self.requests.append((route, body))
        if "prompt_logprobs" in body:
            return {"choices": [self.scored(ids, body["prompt_logprobs"]) for ids in body["prompt"]]}
        return {"choices": [self.sampled(ids, body) for ids in body["prompt"] for _ in range(body["n"])]}

    def scored(self, ids: list[int], count: int) -> dict[str, Any]:
        log_probs, positions = self.log_probs(ids), [None]
        for position in range(1, len(ids)):
            row = log_probs[position - 1]
            order = row.argsort(descending=True).tolist()
            wanted = {*order[:count], ids[position]}
            positions.append({
                str(token): {"logprob": row[token].item(), "rank": rank + 1}
                for rank, token in enumerate(order) if token in wanted
            })  # fmt: skip
        return {"prompt_logprobs": positions}

    @torch.no_grad()
    def sampled(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        made, given = [], []
        while len(made) < body["max_tokens"] and self.model.config.eos_token_id not in made:
            row = (self.model(torch.tensor([ids + made])).logits[0, -1].float() / body["temperature"]).log_softmax(-1)
            made.append(int(torch.multinomial(row.exp(), 1)))
            given.append(row[made[-1]].item() + (self.noise if len(made) % 2 else 0.0))
        names = [f"token_id:{token}" for token in made]
        logprobs = {"tokens": names, "token_logprobs": given, "top_logprobs": [None] * len(made)}
        return {"prompt_token_ids": ids, "token_ids": made, "logprobs": logprobs}
