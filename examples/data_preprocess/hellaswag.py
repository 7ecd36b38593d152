"""HellaSwag, multiple choice, as files to train on; every option of `valor data prepare hellaswag`.

python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("hellaswag"))
