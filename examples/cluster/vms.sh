#!/bin/sh
# Virtual machines, or a rack: once on every machine, the head first; then the run, on the head.
# They have the same Python, scalerl, data and models (/shared), and a private network between them.
set -eu
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/shared/ray-token RAY_USAGE_STATS_ENABLED=0

case "${1:-}" in
  head)   # ADDRESS: of this machine in the private network; its CPUs are the driver's alone
    test -s "$RAY_AUTH_TOKEN_PATH" || (umask 077 && openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
    ray start --head --node-ip-address="$2" --port=6379 --include-dashboard=false --num-cpus=0 --num-gpus=0 ;;
  worker) # ADDRESS: of the head
    ray start --address="$2:6379" ;;
  stop)   # on every machine, the workers first: ends Ray there, and what it runs
    ray stop ;;
  train)  # RECIPE RUN: goes on where it was, however it ended
    exec scalerl train "$2" -o "$3" --cluster ray --resume ;;
  *)
    echo "usage: vms.sh head ADDRESS | worker ADDRESS-OF-HEAD | train RECIPE RUN | stop" >&2
    exit 2 ;;
esac
