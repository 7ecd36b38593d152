"""AIME 2024 and 2025, a test set, as files to train on; every option of `valor data prepare aime`.

python examples/data_preprocess/aime.py --local_save_dir ~/data/aime [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("aime"))
