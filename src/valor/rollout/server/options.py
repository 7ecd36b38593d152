"""Servers in a configuration: contradictions, the plan's line, and how the engine is built."""

import importlib.util

from valor.config import PPOConfig, RolloutConfig
from valor.errors import UserError
from valor.models.load import load_model_config, load_tokenizer
from valor.rollout.base import RolloutEngine
from valor.rollout.server.checks import check_server
from valor.rollout.server.engine import ServerEngine
from valor.rollout.server.launch import started_servers
from valor.rollout.spec import BuildContext, GenerationEngineSpec

_KEY = "actor_rollout_ref.rollout"


def _starts(rollout: RolloutConfig) -> bool:
    """Whether the run starts its servers itself."""
    return rollout.name == "sglang" and not rollout.server.base_url


def _check(config: PPOConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    name, keeps, starts = rollout.name, rollout.server.weight_updates == "none", _starts(rollout)
    many = any(pool.roles == ["rollout"] and pool.nnodes * pool.n_gpus_per_node > 1 for pool in config.pools.values())
    example = "http://localhost:30000" if name == "sglang" else "http://localhost:8000/v1"
    wrong = {
        f"{_KEY}.name={name} asks a server that is running: set {_KEY}.server.base_url, such as {example}": (
            not rollout.server.base_url and not starts
        ),
        f"{_KEY}.name={name} generates on the server's devices: drop {_KEY}.nnodes, and rollout in resource_pools": (
            config.rollout_apart and config.trainer.v1.trainer_mode != "separate_async"
        ),
        f"{_KEY}.name={name}: servers in a pool of their own are started by hand: set {_KEY}.server.base_url": (
            config.rollout_apart and starts
        ),
        f"{_KEY}.name={name}: one process asks all servers: set {_KEY}.nnodes=1 and {_KEY}.n_gpus_per_node=1": many,
        f"{_KEY}.name=server: no server tells log-probs at temperature {rollout.temperature:g} before {_KEY}.top_k "
        "and top_p cut: drop them, or set temperature=1, or take name=vllm": (
            name == "server" and rollout.temperature != 1 and (rollout.top_k > 0 or rollout.top_p < 1)
        ),
        f"{_KEY}.name=trtllm: trtllm-serve takes no weights over HTTP, so it generates with those that it was started "
        f"with, whatever the policy learns: say so by {_KEY}.server.weight_updates=none, or take name=sglang or vllm": (
            name == "trtllm" and not keeps
        ),
        f"{_KEY}.server.sleep: SGLang drops its weights when it sleeps, and is sent none with weight_updates=none: "
        "drop one of them": name == "sglang" and rollout.server.sleep and keeps,
        f"{_KEY}.server.weight_updates=none: a server that is started here holds the model's own weights for ever: "
        f"start it by hand and set {_KEY}.server.base_url": starts and keeps,
    }
    return [line for line, is_so in wrong.items() if is_so]


def _check_start(config: PPOConfig, world_size: int) -> None:
    shared = config.actor_rollout_ref
    if not _starts(shared.rollout):
        path = shared.model.tokenizer_path or shared.model.path
        tokenizer = load_tokenizer(path, trust_remote_code=shared.model.trust_remote_code)
        check_server(shared.rollout, tokenizer, images=config.data.image_key is not None)
        return
    size = shared.rollout.tensor_model_parallel_size
    if importlib.util.find_spec("sglang") is None:
        raise UserError(
            f"{_KEY}.name=sglang: SGLang is not installed here: pip install sglang, or name servers that are running "
            f"already by {_KEY}.server.base_url, or take name=vllm or native"
        )
    if world_size % size:
        raise UserError(
            f"{_KEY}.tensor_model_parallel_size={size}: servers of {size} devices do not fit the {world_size} that "
            f"generate: set it to a divisor of {world_size}"
        )


def _plan(config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    weights = "which keep their weights" if rollout.keeps_weights else "synced every step through files"
    if _starts(rollout):
        return f"servers started here, on {rollout.tensor_model_parallel_size} device(s) each, {weights}"
    return f"{', '.join(rollout.server.base_url)}, {weights}"


def _build(context: BuildContext) -> RolloutEngine:
    config, started = context.config, []
    if _starts(config):
        started, server = started_servers(config, context.model, context.device)
        config = config.model_copy(update={"server": server})
    size = int(load_model_config(context.model).get_text_config().vocab_size)
    options = {"eos_token_ids": context.eos_token_ids, "started": started, "vocabulary": size}
    return ServerEngine(config, **options, images=context.images is not None)


def _spec(name: str, *reads: str) -> GenerationEngineSpec:
    reads = ("server.base_url", "server.api_key_env", "server.weight*", "server.timeout", *reads)
    return GenerationEngineSpec(name, _plan, _build, reads, _check, _check_start, elsewhere=True)


_STARTED = ("tensor_model_parallel_size", "gpu_memory_utilization", "max_model_len", "free_cache_engine")
SERVERS = (
    _spec("server", "server.model"),
    _spec("sglang", "server.sleep", "server.log_dir", *_STARTED, "engine_kwargs.sglang*"),
    _spec("trtllm", "server.model"),
)
