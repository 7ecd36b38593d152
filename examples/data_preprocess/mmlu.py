"""MMLU, multiple choice, as files to train on; every option of `valor data prepare mmlu`.

python examples/data_preprocess/mmlu.py --local_save_dir ~/data/mmlu [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("mmlu"))
