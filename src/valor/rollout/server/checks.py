"""Whether servers do what rollouts need, asked before a run: a lack is one line that says what to start or set."""

from typing import Any

import httpx2

from valor.config import RolloutConfig
from valor.errors import UserError
from valor.http_client import ask, describe
from valor.rollout.base import SamplingParams
from valor.rollout.server.client import CONNECT_SECONDS, root
from valor.rollout.server.dialects import Completion, Reply, TokensAndImages, checked
from valor.rollout.server.fleet import DIALECTS

_KEY = "actor_rollout_ref.rollout"
_TEXT = "What is 12 + 345? Zoë: "
_REPLY_SECONDS = 60.0  # the first request to a server may compile
_WARM = 2.0  # temperature of the second probe
_NOTICEABLE = 1e-3  # difference of two log-probs


def check_server(config: RolloutConfig, tokenizer: Any, *, images: bool = False) -> None:
    """UserError for the first thing that a server of `config.server` lacks; `tokenizer` is the policy's. `images`:
    prompts may have some."""
    for url in config.server.base_url:
        probe = _Probe(url.rstrip("/"), config)
        if config.name != "sglang":
            probe.check_model()
        if config.name == "server":
            probe.check_tokenizer(tokenizer)
        probe.check_log_probs(tokenizer)
        if images:
            probe.check_images(tokenizer)
        if config.server.weight_updates != "none":
            probe.check_updates()


class _Probe:
    """Asks one server."""

    def __init__(self, url: str, config: RolloutConfig) -> None:
        self._url, self._config, self._dialect = url, config, DIALECTS[config.name](config)

    def check_model(self) -> None:
        """It serves the model, with sequences as long as the run's."""
        status, reply = self._ask(f"{self._url}/models")
        try:
            served = {model["id"]: model for model in reply["data"]}
        except (LookupError, TypeError):
            raise self._lack(f"has no list of models (status {status}): the address usually ends in /v1") from None
        name = self._config.server.model
        if name not in served:
            raise self._lack(f"serves {', '.join(served) or 'nothing'}, not '{name}': set {_KEY}.server.model")
        longest, needed = served[name].get("max_model_len"), self._config.max_model_len
        if longest is not None and longest < needed:
            raise self._lack(
                f"takes {longest} tokens, {_KEY}.max_model_len is {needed}: start it with --max-model-len {needed}"
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """It makes the policy's tokens of a text."""
        ids = list(tokenizer(_TEXT)["input_ids"])
        _, answer = self._complete([], 0.0, prompt=_TEXT)
        made = answer["choices"][0].get("prompt_token_ids")
        if not made:
            raise self._lack("returns no token ids (return_token_ids): use vLLM's, or another one that does")
        if made != ids:
            raise self._lack(
                f"has another tokenizer than the policy (it makes {len(made)} tokens of a probe, the policy's "
                f"{len(ids)}): is it the same model?"
            )

    def check_log_probs(self, tokenizer: Any) -> None:
        """It reports the log-probs that training needs: the likeliest token's falls with temperature."""
        ids, config = list(tokenizer(_TEXT)["input_ids"]), self._config
        cold, warm = self._reply(ids, 0.0), self._reply(ids, _WARM, top_k=1)
        (at_one,), (at_warm,) = cold.log_probs, warm.log_probs
        truncated = at_warm > -1e-6  # the log-prob after top_k=1
        follows = at_warm < at_one - _NOTICEABLE
        cut = config.top_k > 0 or config.top_p < 1
        wrong = (cut and truncated) or (config.temperature != 1 and not (follows or truncated))
        if cold.token_ids == warm.token_ids and at_one < -_NOTICEABLE and wrong:
            mode = "raw_logprobs" if cut else "processed_logprobs"
            remedies = {"server": f"start it with --logprobs-mode {mode}"}
            general = f"set {_KEY}.temperature=1 and neither top_k nor top_p"
            raise self._lack(f"reports other log-probs than training needs: {remedies.get(config.name, general)}")

    def check_images(self, tokenizer: Any) -> None:
        """It takes token ids with images, and returns what it has read."""
        ids, dialect = list(tokenizer(_TEXT)["input_ids"]), TokensAndImages(self._config)
        request = Completion(ids, 1, SamplingParams(0.0), 0, [], "valor-probe", None)
        status, answer = self._ask(dialect.address(self._url), dialect.body(request))
        try:
            reads = dialect.read(answer).prompt == ids
        except (LookupError, TypeError, ValueError):
            reads = False
        if not reads:
            raise self._lack(
                f"takes no token ids with images (/inference/v1/generate, status {status}): start vLLM 0.30 or a later "
                f"one, or set {_KEY}.name=native"
            )

    def check_updates(self) -> None:
        """It takes weights, in the precision of generation."""
        if self._config.name == "sglang":
            status, _ = self._ask(f"{root(self._url)}/weights_checker", {"action": "checksum"})
            if status != 200:
                raise self._lack(
                    "does not tell checksums of its weights (/weights_checker): take a newer SGLang, or set "
                    f"{_KEY}.server.weight_updates=none"
                )
            return
        status, answer = self._ask(f"{root(self._url)}/collective_rpc", {"method": "valor_describe"})
        if status != 200:
            raise self._lack(
                "takes no weights: start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
                "valor.rollout.server.receiver.WeightReceiver (docs/rollout.md), or let it keep its own with "
                f"{_KEY}.server.weight_updates=none"
            )
        worker, dtype = answer["results"][0], self._config.dtype
        if worker["dtype"] != dtype:
            raise self._lack(
                f"computes in {worker['dtype']}: start it with --dtype {dtype}, or set {_KEY}.dtype={worker['dtype']}"
            )
        if worker["parts"] > 1:
            raise self._lack(
                "has replicas or pipeline stages, and weights are sent to one whole model: start one server for each "
                "replica and list them all, split the model by --tensor-parallel-size alone"
            )
        if worker["ends_in_parts"]:
            raise self._lack(
                "is on a CPU, where vLLM ends when prompts are too long to be read at once: start it with "
                "--no-enable-chunked-prefill"
            )

    def _complete(self, ids: list[int], temperature: float, top_k: int = -1, **fields: Any) -> tuple[Completion, Any]:
        """One token after the prompt `ids`, with `fields` of the JSON replaced: the request and the server's answer."""
        request = Completion(ids, 1, SamplingParams(temperature, top_k), 0, [], "valor-probe", None)
        status, answer = self._ask(self._dialect.address(self._url), self._dialect.body(request) | fields)
        if status != 200:
            asleep = " (an earlier run may have left it asleep: start it again)" if self._config.server.sleep else ""
            raise self._lack(f"refuses a completion (status {status}): {answer}{asleep}")
        return request, answer

    def _reply(self, ids: list[int], temperature: float, top_k: int = -1) -> Reply:
        request, answer = self._complete(ids, temperature, top_k)
        try:
            if (counted := self._dialect.prompt_tokens(answer)) != len(ids):
                raise ValueError(f"counts {counted} tokens in a prompt of {len(ids)}")
            return checked(self._dialect.read(answer), request, None)
        except (LookupError, TypeError) as error:
            raise self._lack(f"is of a release that docs/servers.md does not tell of: {error!r} in its reply") from None
        except ValueError as error:
            raise self._lack(str(error)) from None

    def _ask(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON (None: no JSON) of a POST, or of a GET without body. UserError if nobody answers."""
        key = self._config.server.api_key_env
        timeout = httpx2.Timeout(_REPLY_SECONDS, connect=CONNECT_SECONDS)
        try:
            method = "GET" if body is None else "POST"
            reply = ask(method, url, api_key_env=key, timeout=timeout, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UserError(f"no server answers at {_KEY}.server.base_url={self._url}: {describe(error)}") from None
        if reply.status_code in (401, 403):
            raise self._lack(
                f"refuses the key (status {reply.status_code}): put it into the environment variable {key} "
                f"({_KEY}.server.api_key_env)"
            )
        try:
            return reply.status_code, reply.json()
        except ValueError:
            return reply.status_code, None

    def _lack(self, what: str) -> UserError:
        return UserError(f"the server at {_KEY}.server.base_url={self._url} {what}")
