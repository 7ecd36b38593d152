"""`python -m valor.trainer.main_ppo key=value …`: PPO, GRPO and relatives; `critic_pretrain`: a critic before them."""

import sys
from functools import partial

from valor.config import CriticPretrainConfig, PPOConfig
from valor.trainer.command import run_command, trains

main = partial(run_command, "ppo", PPOConfig, trains("valor.trainer.ppo:PPORun"))
critic_pretrain = partial(
    run_command, "critic pretrain", CriticPretrainConfig, trains("valor.trainer.pretrain:CriticPretrainRun")
)

if __name__ == "__main__":
    sys.exit(main())
