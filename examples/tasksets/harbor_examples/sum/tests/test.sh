#!/bin/bash
# A quarter for a file, the rest for the right number in it.
reward=0
[ -f /app/sum.txt ] && reward=0.25
[ "$(cat /app/sum.txt 2>/dev/null)" = 12 ] && reward=1
echo "{\"reward\": $reward, \"files\": $(ls /app | wc -l)}" > /logs/verifier/reward.json
