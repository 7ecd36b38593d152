"""NQ and HotpotQA in the manner of Search-R1 as files to train on; every option of `valor data prepare search`.

python examples/data_preprocess/preprocess_search_r1_dataset.py --local_save_dir ~/data/search
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("search"))
