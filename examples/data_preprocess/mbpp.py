"""MBPP, short Python tasks, as files to train on; every option of `valor data prepare mbpp`.

python examples/data_preprocess/mbpp.py --local_save_dir ~/data/mbpp [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("mbpp"))
