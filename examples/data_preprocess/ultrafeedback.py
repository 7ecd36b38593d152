"""UltraFeedback, pairs of answers, as files to train on; every option of `valor data prepare ultrafeedback`.

python examples/data_preprocess/ultrafeedback.py --local_save_dir ~/data/ultrafeedback [--local_dataset_path PATH …]
"""

import sys

from valor.data.prepare import script

if __name__ == "__main__":
    sys.exit(script("ultrafeedback"))
