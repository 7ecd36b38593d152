"""How much the fault suite tries, and where from; not in a conftest, whose name several folders share."""

import os
from pathlib import Path

KILLS = int(os.environ.get("VALOR_KILLS", "7"))
SEED = int(os.environ.get("VALOR_FAULT_SEED", "0"))

# A reward that an untrained model earns about every other time.
PARITY = f"reward.custom_reward_function.path={Path(__file__).parents[1] / 'integration' / 'parity_reward.py'}"
