#!/bin/bash
if [ "$(cat output.txt 2>/dev/null)" = ward ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
