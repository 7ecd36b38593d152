"""AMC 2023, a test set, as files to train on; every option of `valor data prepare amc`.

python examples/data_preprocess/amc.py --local_save_dir ~/data/amc [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("amc"))
