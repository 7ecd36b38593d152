"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives; `critic_pretrain`: a critic before them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

from valor.config import CriticPretrainConfig, PPOConfig
from valor.trainer.command import run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    return run_command("ppo", argv, PPOConfig, _ppo)


def critic_pretrain(argv: Sequence[str] | None = None) -> int:
    """The same for `valor critic pretrain`: a critic fitted to rollouts before, or without, any PPO."""
    return run_command("critic pretrain", argv, CriticPretrainConfig, _critic_pretrain)


def _ppo(config: PPOConfig, command: str) -> int:
    from valor.collector.inputs import RunInputs
    from valor.controller.nodes import node_zero, serve
    from valor.controller.placement import resolve_placement
    from valor.models.load import check_critic_tokenizer
    from valor.rollout.registry import GENERATION_ENGINES
    from valor.tracking.progress import phase
    from valor.trainer.ppo import PPORun
    from valor.trainer.run import fit_again

    placement, rank = resolve_placement(config), config.trainer.node_rank
    engine = GENERATION_ENGINES[config.actor_rollout_ref.rollout.name]
    engine.check_start(config, placement.pools[placement.pool_of("rollout")].world_size)
    if rank:
        return serve(config.trainer, placement)
    with phase("tokenizer, data and graders"):
        inputs = RunInputs(config)
    check_critic_tokenizer(config, inputs.tokenizer)
    with nullcontext() if rank is None else node_zero(config.trainer, placement):
        return fit_again(
            PPORun(config, inputs, placement, command), lambda: PPORun(config, RunInputs(config), placement, command)
        )


def _critic_pretrain(config: CriticPretrainConfig, command: str) -> int:
    from valor.controller.placement import resolve_pool
    from valor.trainer.pretrain import CriticPretrainRun
    from valor.trainer.run import fit_again

    def run() -> CriticPretrainRun:
        pool = resolve_pool(config.trainer, config.ray_kwargs.ray_init.address)
        return CriticPretrainRun(config, *pool, command)

    return fit_again(run(), run)


if __name__ == "__main__":
    sys.exit(main())
