#!/bin/bash
# Slurm, one GPU of one node: sbatch .ci/recipes/slurm.sh, in the course's folder.
# Add the partition and the account of your cluster. Compute nodes often have no network: run
# `make .venv/installed` once on the login node first, so that .venv is there.
#SBATCH --job-name=labs
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --gres=gpu:1
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=labs-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export LABUTILS_RUNS="${LABUTILS_RUNS:-$PWD/runs/slurm-${SLURM_JOB_ID:-local}}"
python=.venv/bin/python
"$python" -m labutils doctor
"$python" -m labutils labs &
child=$!
# Two minutes before the end Slurm sends SIGTERM to this script, which passes it on.
trap 'kill -TERM "$child"; wait "$child"' TERM
wait "$child"
