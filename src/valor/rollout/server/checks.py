"""Servers in a configuration, and whether they do what rollouts need: a lack is one line that says what to start."""

from __future__ import annotations

import math
from typing import Any

import httpx2

from valor.config import PPOConfig, RolloutConfig
from valor.errors import UserError
from valor.models.load import load_tokenizer
from valor.rollout.server.connection import CONNECT_SECONDS, addresses, headers, root
from valor.rollout.server.engine import AS_TOKENS, ServerEngine
from valor.rollout.spec import GenerationEngineSpec

_KEY = "actor_rollout_ref.rollout"
_PROBE = "What is 12 + 345? Zoë: "
_PROBE_SECONDS = 60.0  # the first request of a server may compile
_WARM = 2.0  # probing temperature


def check_server(config: RolloutConfig, tokenizer: Any) -> None:
    """UserError for the first thing that a server of `config.server` lacks; `tokenizer` is the policy's."""
    for url in addresses(config.server):
        server = _Server(url, config)
        _check_model(server, config)
        _check_tokens(server, config, tokenizer)
        if config.server.weight_updates != "none":
            _check_updates(server, config)


class _Server:
    """One server under examination."""

    def __init__(self, url: str, config: RolloutConfig) -> None:
        self.url = url
        self._headers, self._key_env = headers(config.server), config.server.api_key_env

    def ask(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and reply (None: no JSON) of a POST, or of a GET without body. UserError if nobody answers."""
        timeout = httpx2.Timeout(_PROBE_SECONDS, connect=CONNECT_SECONDS)
        try:
            method = "GET" if body is None else "POST"
            reply = httpx2.request(method, url, json=body, headers=self._headers, timeout=timeout)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            said = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UserError(f"no server answers at {_KEY}.server.base_url={self.url}: {said}") from None
        if reply.status_code in (401, 403):
            raise self.lack(
                f"refuses the key (status {reply.status_code}): put it into the environment variable {self._key_env} "
                f"({_KEY}.server.api_key_env)"
            )
        try:
            return reply.status_code, reply.json()
        except ValueError:
            return reply.status_code, None

    def lack(self, what: str) -> UserError:
        return UserError(f"the server at {_KEY}.server.base_url={self.url} {what}")


def _check_model(server: _Server, config: RolloutConfig) -> None:
    status, reply = server.ask(f"{server.url}/models")
    try:
        served = {model["id"]: model for model in reply["data"]}
    except (LookupError, TypeError):
        raise server.lack(f"has no list of models (status {status}): the address usually ends in /v1") from None
    name = config.server.model
    if name not in served:
        raise server.lack(f"serves {', '.join(served) or 'nothing'}, not '{name}': set {_KEY}.server.model")
    longest, needed = served[name].get("max_model_len"), config.max_model_len
    if longest is not None and longest < needed:
        raise server.lack(
            f"takes {longest} tokens, {_KEY}.max_model_len is {needed}: start it with --max-model-len {needed}"
        )


def _check_tokens(server: _Server, config: RolloutConfig, tokenizer: Any) -> None:
    """Token ids in both directions, the policy's tokenizer, and log-probs of the distribution that training needs."""
    ids = list(tokenizer(_PROBE)["input_ids"])
    cold, warm = (_probe(server, config.server.model, *probe) for probe in ((_PROBE, 1.0), (ids, _WARM)))
    if cold["prompt_token_ids"] != ids:
        raise server.lack(
            f"has another tokenizer than the policy (it makes {len(cold['prompt_token_ids'])} tokens of a probe, the "
            f"policy's {len(ids)}): is it the same model?"
        )
    spread, warm_spread = _spread(cold), _spread(warm)
    likeliest = warm["logprobs"]["top_logprobs"][0].values()
    if sum(map(math.exp, likeliest)) > 1.001:
        follows = None  # logits
    else:
        follows = warm_spread <= spread * (1 + 1 / _WARM) / 2
    # At temperature 1 both are the same, unless a truncated distribution is told.
    cut = config.top_k > 0 or config.top_p < 1
    if follows is None or (config.temperature != 1 and not follows) or (cut and follows):
        mode = "raw_logprobs" if cut else "processed_logprobs"
        raise server.lack(f"reports other log-probs than training needs: start it with --logprobs-mode {mode}")


def _probe(server: _Server, model: str, prompt: str | list[int], temperature: float) -> dict[str, Any]:
    """The first token after `prompt`, as the server tells it."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": 5, "temperature": temperature}
    status, reply = server.ask(f"{server.url}/completions", asked | AS_TOKENS)
    if status != 200:
        raise server.lack(f"refuses a completion (status {status}): {reply}")
    choice = reply["choices"][0]
    if not choice.get("token_ids") or not choice.get("prompt_token_ids"):
        raise server.lack("returns no token ids (return_token_ids): use vLLM's, or another one that does")
    if not (choice.get("logprobs") or {}).get("top_logprobs"):
        raise server.lack("returns no log-probs for /completions: use vLLM's, or another one that does")
    return choice


def _spread(choice: dict[str, Any]) -> float:
    """Between the likeliest token and the least likely of those told: divided by the temperature, if it acts."""
    told = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:5]
    return told[0] - told[-1]


def _check_updates(server: _Server, config: RolloutConfig) -> None:
    status, reply = server.ask(f"{root(server.url)}/collective_rpc", {"method": "valor_describe"})
    if status != 200:
        raise server.lack(
            "takes no weights: start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
            "valor.rollout.server.receiver.WeightReceiver (docs/rollout.md), or let it keep its own with "
            f"{_KEY}.server.weight_updates=none"
        )
    held = reply["results"][0]
    if held["dtype"] != config.dtype:
        raise server.lack(
            f"computes in {held['dtype']}: start it with --dtype {config.dtype}, or set {_KEY}.dtype={held['dtype']}"
        )
    if held["parts"] > 1:
        raise server.lack(
            "has replicas or pipeline stages, and weights are sent to one whole model: start one server for each "
            "replica and list them all, split the model by --tensor-parallel-size alone"
        )


def _check(config: PPOConfig) -> list[str]:
    lines, rollout = [], config.actor_rollout_ref.rollout
    if not rollout.server.base_url:
        lines.append(
            f"{_KEY}.name=server asks a server that is running: set {_KEY}.server.base_url, such as "
            "http://localhost:8000/v1"
        )
    if config.rollout_apart and config.trainer.v1.trainer_mode != "separate_async":
        lines.append(
            f"{_KEY}.name=server generates on the server's devices: drop {_KEY}.nnodes, and rollout in resource_pools"
        )
    if any(pool.roles == ["rollout"] and pool.nnodes * pool.n_gpus_per_node > 1 for pool in config.pools.values()):
        lines.append(
            f"{_KEY}.name=server: one process asks all servers: set {_KEY}.nnodes=1 and {_KEY}.n_gpus_per_node=1"
        )
    if rollout.temperature != 1 and (rollout.top_k > 0 or rollout.top_p < 1):
        lines.append(
            f"{_KEY}.name=server: no server tells log-probs at temperature {rollout.temperature:g} before {_KEY}.top_k "
            "and top_p cut: drop them, or set temperature=1, or take name=vllm"
        )
    return lines


def _check_start(config: PPOConfig, world_size: int) -> None:
    shared = config.actor_rollout_ref
    path = config.data.tokenizer or shared.model.tokenizer_path or shared.model.path
    check_server(shared.rollout, load_tokenizer(path, trust_remote_code=shared.model.trust_remote_code))


def _plan(config: PPOConfig) -> str:
    server = config.actor_rollout_ref.rollout.server
    weights = "which keeps its weights" if server.weight_updates == "none" else "synced every step"
    return f"{', '.join(server.base_url)}, {weights}"


SERVER = GenerationEngineSpec(
    name="server",
    reads=("server.*",),
    check=_check,
    check_start=_check_start,
    plan=_plan,
    build=lambda context: ServerEngine(context.config, eos_token_ids=context.eos_token_ids),
    elsewhere=True,
)
