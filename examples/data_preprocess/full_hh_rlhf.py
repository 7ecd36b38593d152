"""Helpful and harmless conversations for reward model training (rm), supervised training (sft) or RL (rl).

    python examples/data_preprocess/full_hh_rlhf.py --split rm --local_dir ~/data/full_hh_rlhf   # writes into …/rm

Takes the options of `valor data prepare hh_rlhf`; `--split` is verl's and says what is made: rm (pairs), sft, rl.
"""

import argparse
import sys

from valor.data.prepare import script

FORMS = {"rm": "pairs", "sft": "sft", "rl": "prompts"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--split", choices=FORMS, required=True)
    parser.add_argument("--local_dir", "--local_save_dir", default="~/data/full_hh_rlhf")
    args, others = parser.parse_known_args()
    sys.exit(script("hh_rlhf", ["--as", FORMS[args.split], "--out", f"{args.local_dir}/{args.split}", *others]))
