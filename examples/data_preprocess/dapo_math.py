"""DAPO-Math-17k, one row a problem, as files to train on; every option of `valor data prepare dapo_math`.

python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/dapo_math [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("dapo_math"))
