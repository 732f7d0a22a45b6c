#!/bin/sh
# Trains a second epoch, from the newest checkpoint in ./checkpoint whose files are whole.
here=$(cd "$(dirname "$0")" && pwd) || exit

exec msrun --worker_num=8 --local_worker_num=8 --log_dir=msrun_log --join=True \
    --resume=checkpoint "$here/train_recover.py" --epochs 2 "$@"
