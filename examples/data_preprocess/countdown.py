"""Countdown puzzles, made by reasoning-gym, as files to train on; every option of `valor data prepare countdown`.

python examples/data_preprocess/countdown.py --local_save_dir ~/data/countdown
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("countdown"))
