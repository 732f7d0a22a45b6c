#!/bin/sh
# Trains from the start on 4 ranks. A death ends the job with its step saved: without
# --on_failure=dump, msrun would replace the rank and save nothing. Extra arguments go to
# mindio_ttp_case.py.
here=$(cd "$(dirname "$0")" && pwd) || exit

export MS_ENABLE_TFT='{TTP:1}'
export MINDIO_FOR_MINDSPORE=1

exec msrun --worker_num=4 --local_worker_num=4 --join=True \
    --log_dir=./ttp_log --cluster_time_out=300 --on_failure=dump "$here/mindio_ttp_case.py" "$@"
