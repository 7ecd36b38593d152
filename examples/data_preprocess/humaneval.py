"""HumanEval, Python functions, a test set, as files to train on; every option of `valor data prepare humaneval`.

python examples/data_preprocess/humaneval.py --local_save_dir ~/data/humaneval [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("humaneval"))
