#!/bin/sh
# Starts the scheduler (sched) or one worker (worker_3) in the background, as MindSpore's run.sh does:
# start.sh NAME WORDS, where WORDS are those that follow msrun. What it prints goes to NAME.log, what
# its rank prints also to log_NAME, its process id to NAME.pid.
name=$1
shift

case $name in
sched) export MS_ROLE=MS_SCHED ;;
*) export MS_ROLE=MS_WORKER ;;
esac
export MS_NODE_ID="$name" MS_WORKER_NUM=8 MS_SCHED_HOST="${MS_SCHED_HOST:-127.0.0.1}" MS_SCHED_PORT=8118

msrun --log_dir="log_$name" "$@" >>"$name.log" 2>&1 &
echo $! >"$name.pid"
