"""MATH, competition problems, as files to train on; every option of `valor data prepare math`.

python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("math"))
