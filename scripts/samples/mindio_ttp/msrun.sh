#!/bin/sh
# Trains from the start on 4 ranks. Extra arguments go to mindio_ttp_case.py.
here=$(cd "$(dirname "$0")" && pwd) || exit

export MS_ENABLE_TFT='{TTP:1}'
export MINDIO_FOR_MINDSPORE=1

exec msrun --worker_num=4 --local_worker_num=4 --master_port=10970 --join=True \
    --log_dir=./ttp_log --cluster_time_out=300 "$here/mindio_ttp_case.py" "$@"
