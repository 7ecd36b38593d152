"""`python -m valor.trainer.main_sft key=value …`: supervised fine-tuning; `rm_train`: reward models from pairs."""

import sys
from functools import partial

from valor.config import RMConfig, SFTConfig
from valor.trainer.command import run_command, trains

main = partial(run_command, "sft", SFTConfig, trains("valor.trainer.supervised:SFTRun"))
rm_train = partial(run_command, "rm train", RMConfig, trains("valor.trainer.rm:RewardModelRun"))

if __name__ == "__main__":
    sys.exit(main())
