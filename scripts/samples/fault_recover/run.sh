#!/bin/sh
# Trains an epoch on 8 ranks; each writes what it holds to ./checkpoint. Extra arguments go to
# train_recover.py.
here=$(cd "$(dirname "$0")" && pwd) || exit

exec msrun --worker_num=8 --local_worker_num=8 --log_dir=msrun_log --join=True \
    "$here/train_recover.py" "$@"
