"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives from one configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

from valor.config import PPOConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run (each job of) the command line; the exit code."""
    return run_command("ppo", argv, PPOConfig, _start)


def _start(config: PPOConfig, command: str) -> int:
    from valor.collector.inputs import RunInputs
    from valor.controller import resolve_placement
    from valor.controller.nodes import node_zero, serve
    from valor.trainer.capabilities import check_algorithms, check_engine
    from valor.trainer.critic_tokenizer import check_critic_tokenizer
    from valor.trainer.ppo import PPORun

    check_algorithms(config)
    placement, rank = resolve_placement(config), config.trainer.node_rank
    check_engine(config, placement.pools[placement.pool_of("rollout")].world_size)
    if rank:
        return serve(config.trainer, placement)
    inputs = RunInputs(config)
    check_critic_tokenizer(config, inputs.tokenizer)
    with nullcontext() if rank is None else node_zero(config.trainer, placement):
        return PPORun(config, inputs, placement, command).fit()


if __name__ == "__main__":
    sys.exit(main())
