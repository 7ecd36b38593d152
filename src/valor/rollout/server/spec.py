"""What the engine that asks servers tells of itself."""

from __future__ import annotations

from valor.config.ppo import PPOConfig
from valor.rollout.base import RolloutEngine
from valor.rollout.spec import BuildContext, GenerationEngineSpec

_KEY = "actor_rollout_ref.rollout"


def _check(config: PPOConfig) -> list[str]:
    lines, rollout = [], config.actor_rollout_ref.rollout
    if not rollout.server.base_url:
        lines.append(
            f"{_KEY}.name=server asks a server that is running: set {_KEY}.server.base_url, such as "
            "http://localhost:8000/v1"
        )
    if config.rollout_apart:
        lines.append(
            f"{_KEY}.name=server generates on the server's devices: drop {_KEY}.nnodes, and rollout in resource_pools"
        )
    if rollout.temperature != 1 and (rollout.top_k > 0 or rollout.top_p < 1):
        lines.append(
            f"{_KEY}.name=server: no server tells log-probs at temperature {rollout.temperature:g} before {_KEY}.top_k "
            "and top_p cut: drop them, or set temperature=1, or take name=vllm"
        )
    return lines


def _check_start(config: PPOConfig, world_size: int) -> None:
    from valor.models.load import load_tokenizer
    from valor.rollout.server.checks import check_server

    model = config.actor_rollout_ref.model
    path = config.data.tokenizer or model.tokenizer_path or model.path
    check_server(config.actor_rollout_ref.rollout, load_tokenizer(path, trust_remote_code=model.trust_remote_code))


def _plan(config: PPOConfig) -> str:
    server = config.actor_rollout_ref.rollout.server
    weights = "which keeps its weights" if server.weight_updates == "none" else "synced every step"
    return f"{', '.join(server.base_url)}, {weights}"


def _build(context: BuildContext) -> RolloutEngine:
    from valor.rollout.server.engine import ServerEngine

    return ServerEngine(context.config, eos_token_ids=context.eos_token_ids)


SERVER = GenerationEngineSpec(
    name="server",
    reads=("server.*",),
    check=_check,
    check_start=_check_start,
    plan=_plan,
    build=_build,
)
