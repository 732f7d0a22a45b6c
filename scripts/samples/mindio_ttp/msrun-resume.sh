#!/bin/sh
# Goes on from the newest whole checkpoint in ./ttp_checkpoints. Extra arguments go to
# mindio_ttp_case.py and should be those that msrun.sh was given.
here=$(cd "$(dirname "$0")" && pwd) || exit

export MS_ENABLE_TFT='{TTP:1}'
export MINDIO_FOR_MINDSPORE=1

exec msrun --worker_num=4 --local_worker_num=4 --join=True \
    --log_dir=./ttp_log --cluster_time_out=300 --on_failure=dump "$here/mindio_ttp_case.py" --is_recover=1 "$@"
