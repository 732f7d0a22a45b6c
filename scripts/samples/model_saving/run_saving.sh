#!/bin/sh
# Trains on 8 ranks and saves checkpoints in ./src_checkpoints. Extra arguments go to
# train_saving.py: --integrated_save 0 makes every rank write a model.
here=$(cd "$(dirname "$0")" && pwd) || exit

exec msrun --worker_num=8 --local_worker_num=8 --log_dir=msrun_log --join=True \
    --cluster_time_out=300 "$here/train_saving.py" "$@"
