"""Servers in a configuration, and whether they do what rollouts need: a lack is one line that says what to start."""

import math
from typing import Any

import httpx2

from valor.config import RolloutConfig
from valor.errors import UserError
from valor.http_client import describe, json_headers
from valor.rollout.base import SamplingParams
from valor.rollout.server.connection import CONNECT_SECONDS, root
from valor.rollout.server.dialects import AS_TOKENS, Ask, Reply, checked
from valor.rollout.server.fleet import DIALECTS

_KEY = "actor_rollout_ref.rollout"
_PROBE = "What is 12 + 345? Zoë: "
_PROBE_SECONDS = 60.0  # the first request of a server may compile
_WARM = 2.0  # probing temperature


def check_server(config: RolloutConfig, tokenizer: Any) -> None:
    """UserError for the first thing that a server of `config.server` lacks; `tokenizer` is the policy's."""
    for url in config.server.base_url:
        server = _Server(url.rstrip("/"), config)
        if config.name != "sglang":
            _check_model(server, config)
        if config.name != "server":
            _check_dialect(server, config, tokenizer)
            continue
        _check_tokens(server, config, tokenizer)
        if config.server.weight_updates != "none":
            _check_updates(server, config)


class _Server:
    """One server under examination."""

    def __init__(self, url: str, config: RolloutConfig) -> None:
        self.url, self._key_env = url, config.server.api_key_env

    def ask(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and reply (None: no JSON) of a POST, or of a GET without body. UserError if nobody answers."""
        timeout = httpx2.Timeout(_PROBE_SECONDS, connect=CONNECT_SECONDS)
        try:
            method = "GET" if body is None else "POST"
            reply = httpx2.request(method, url, json=body, headers=json_headers(self._key_env), timeout=timeout)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"no server answers at {_KEY}.server.base_url={self.url}: {describe(error)}") from None
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
    logits = sum(map(math.exp, warm["logprobs"]["top_logprobs"][0].values())) > 1.001
    follows = warm_spread <= spread * (1 + 1 / _WARM) / 2
    # At temperature 1 both are the same, unless a truncated distribution is told.
    cut = config.top_k > 0 or config.top_p < 1
    if logits or (config.temperature != 1 and not follows) or (cut and follows):
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


def _check_dialect(server: _Server, config: RolloutConfig, tokenizer: Any) -> None:
    """The same of SGLang's and TensorRT-LLM's servers, by the likeliest token: its log-prob falls with temperature."""
    dialect, ids = DIALECTS[config.name](config), list(tokenizer(_PROBE)["input_ids"])

    def ask(temperature: float, **cut: Any) -> Reply:
        params = SamplingParams(temperature, **cut)
        probe = Ask(ids, 1, params, 0, [], "valor-probe", None)
        status, reply = server.ask(dialect.address(server.url), dialect.body(probe))
        if status != 200:
            asleep = " (an earlier run may have left it asleep: start it again)" if config.server.sleep else ""
            raise server.lack(f"refuses a completion (status {status}): {reply}{asleep}")
        try:
            if (counted := dialect.prompt_tokens(reply)) != len(ids):
                raise server.lack(f"counts {counted} tokens in a prompt of {len(ids)}")
            told = checked(dialect.read(reply), probe, None)
        except (LookupError, TypeError, ValueError) as error:
            raise server.lack(
                f"is no {config.name} server of a release that docs/servers.md tells of: {error!r}"
            ) from None
        return told

    cold, warm = ask(0.0), ask(_WARM, top_k=1)
    (one,), (other,) = cold.log_probs, warm.log_probs
    cuts = other > -1e-6 and one < -1e-3  # tells the log-prob behind the cut
    follows = other < one
    cut = config.top_k > 0 or config.top_p < 1
    if cold.token_ids == warm.token_ids and ((cut and cuts) or (config.temperature != 1 and not (follows or cuts))):
        raise server.lack(
            f"reports other log-probs than training needs: set {_KEY}.temperature=1 and neither top_k nor top_p"
            + (" (SGLang: start it without SGLANG_RETURN_ORIGINAL_LOGPROB)" if config.name == "sglang" else "")
        )
    if config.name == "sglang" and config.server.weight_updates != "none":
        status, _ = server.ask(f"{root(server.url)}/weights_checker", {"action": "checksum"})
        if status != 200 or not cold.weights:
            raise server.lack(
                "does not tell versions and checksums of its weights (/weights_checker, meta_info.weight_versions): "
                f"take a newer SGLang, or set {_KEY}.server.weight_updates=none"
            )


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
