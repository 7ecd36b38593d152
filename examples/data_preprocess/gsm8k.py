"""GSM8K, grade-school word problems, as files to train on; every option of `valor data prepare gsm8k`.

python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("gsm8k"))
