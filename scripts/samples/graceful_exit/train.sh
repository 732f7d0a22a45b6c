#!/bin/sh
# A graceful exit from beginning to end: ranks train, graceful_exit.json is changed meanwhile, all
# of them leave at one step; then msrun --resume trains to the end. From any folder: everything is
# written into the present one. Arguments go to graceful_exit_case.py; WORKER_NUM is 8 unless set.
# msrun must be on the PATH.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit
workers=${WORKER_NUM:-8}
log=graceful_exit_log/worker_0.log
job=

say() { printf '\n== %s\n' "$*"; }
ask() {
    printf '{"GracefulExit": %s}\n' "$1" > graceful_exit.json.new # whole at once for who watches
    mv graceful_exit.json.new graceful_exit.json
}

# 1: train
cp "$here/graceful_exit.json" . 2> /dev/null # it may be here already
ask 0
trap 'ask 0' EXIT # whatever happens
stop() {
    trap '' INT TERM
    [ -n "$job" ] && kill "$job" && wait "$job"
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM
say "training on $workers ranks"
msrun --worker_num="$workers" --local_worker_num="$workers" --join=True \
    --log_dir=./graceful_exit_log --local-ranks-filter=0 "$here/graceful_exit_case.py" "$@" &
job=$!

# 2: ask, once it is under way
until [ "$log" -nt graceful_exit.json ] && grep -q 'step: 5, loss' "$log"; do
    kill -0 "$job" 2> /dev/null || { wait "$job"; exit; }
    sleep 0.2
done
tail -n 2 "$log"
say 'graceful_exit.json is changed to {"GracefulExit": 1}'
ask 1
wait "$job" || exit
job=

# 3: what every rank said and saved
say 'all ranks have left, msrun with exit code 0'
grep -h 'Graceful exit' graceful_exit_log/worker_*.log
ls rank_*/LeNet_train.*

# 4: go on; the request was for the run that was, so it may stay in the file
say 'msrun --resume'
msrun --resume || exit
tail -n 1 "$log"
