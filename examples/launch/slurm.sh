#!/bin/bash
# Learners in Slurm: an array without gangs. Each task is one learner, is requeued at its time limit, and goes on.
#
# Change: array, time, partition, GPU, the folder. Submit: SHOAL_LINK='shoal://...' sbatch slurm.sh
#
# Where nodes have no way out, run on the login node `shoal keep --relay-bulk 20M --listen /ip4/0.0.0.0/tcp/7701`
# with the same link, and set SHOAL_SEED to the address that it prints.

#SBATCH --job-name=shoal
#SBATCH --array=0-7
#SBATCH --time=04:00:00
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --requeue
#SBATCH --signal=TERM@360
#SBATCH --output=shoal-%A_%a.log
#SBATCH --open-mode=append

export SHOAL_YES=1 SHOAL_PATIENCE=300  # less than the 360 s above
export SHOAL_DIRECTORY=${SCRATCH:-$HOME}/shoal/$SLURM_ARRAY_TASK_ID  # on a disk that all nodes have

# Slurm signals srun's step, not this script, which is there to ask for another turn.
srun shoal join --plain
code=$?

case $code in
  0 | 2 | 4) exit $code ;; # the run is over, or no start helps: see docs/reference/output.md
esac
if [ "${SLURM_RESTART_COUNT:-0}" -ge 100 ]; then
  exit $code
fi
sleep 10
scontrol requeue "$SLURM_JOB_ID"
