"""MATH-500, a test set, as files to train on; every option of `valor data prepare math500`.

python examples/data_preprocess/math500.py --local_save_dir ~/data/math500 [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("math500"))
