"""Game of 24, all solvable hands, as files to train on; every option of `valor data prepare game24`.

python examples/data_preprocess/game24.py --local_save_dir ~/data/game24
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("game24"))
