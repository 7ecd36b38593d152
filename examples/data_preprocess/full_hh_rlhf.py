"""Helpful and harmless conversations for reward model training (rm), supervised training (sft) or RL (rl).

    python examples/data_preprocess/full_hh_rlhf.py --split rm --local_dir ~/data/full_hh_rlhf   # writes into …/rm

Takes the options of `valor data prepare hh_rlhf`; `--split` is verl's and says what is made: rm (pairs), sft, rl.
Given again, it is Valor's: `--split rl --split train` writes no test.parquet.
"""

import argparse
import sys

from valor.data.build import SPLITS
from valor.data.prepare import script

FORMS = {"rm": "pairs", "sft": "sft", "rl": "prompts"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--split", choices=[*FORMS, *SPLITS], action="append", required=True)
    parser.add_argument("--local_dir", "--local_save_dir", default="~/data/full_hh_rlhf")
    args, others = parser.parse_known_args()
    forms = [one for one in args.split if one in FORMS]
    if len(forms) != 1:
        parser.error(f"--split says once what is made: {', '.join(FORMS)}")
    splits = [word for one in args.split if one in SPLITS for word in ("--split", one)]
    sys.exit(script("hh_rlhf", ["--as", FORMS[forms[0]], "--out", f"{args.local_dir}/{forms[0]}", *splits, *others]))
