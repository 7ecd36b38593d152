#!/bin/bash
# sbatch deploy/slurm.sh key=value …      One run on all nodes of the job: valor is started once on each.
# The same folder, environment and model paths have to be there on every node.
#SBATCH --job-name=valor
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=TERM@120
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER=$(getent ahostsv4 "$first" | awk 'NR==1 {print $1}')
export MASTER
# Two minutes before the time limit the run is asked to stop: it finishes its step and saves, and the same command goes on.
srun --kill-on-bad-exit=1 bash -c 'exec "${VALOR:-valor}" ppo "$@" trainer.nnodes="$SLURM_NNODES" \
    trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-8}" trainer.node_rank="$SLURM_NODEID" trainer.master_addr="$MASTER"' valor "$@"
