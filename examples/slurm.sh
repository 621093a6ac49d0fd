#!/bin/bash
# Train on two nodes of 8 GPUs under Slurm, until the run is complete, however often the job is interrupted:
#
#     sbatch examples/slurm.sh
#
# Submit it from the root of the checkout, on a file system that the nodes share. Five minutes before the time limit,
# or when the job is preempted, Slurm sends SIGTERM to the two torchruns, which pass it on to the ranks. They save a
# checkpoint after the step that they are in, and end. The job then puts itself back into the queue, and when it starts
# again, --resume auto goes on from that checkpoint. The same happens after a crash, if a new checkpoint was saved since
# the job started: a run that fails without progress is not tried again.
#SBATCH --job-name=penteract
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # a torchrun, which starts one rank per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300         # seconds before the limit. Without B: it goes to the torchruns, and not to this script
#SBATCH --requeue                 # allows what `scontrol requeue` does below; after a node's failure Slurm does it itself
#SBATCH --open-mode=append        # one log of all starts
#SBATCH --output=%x-%j.log
set -uo pipefail
trap : TERM                       # some preemptions signal this script, too: it lives on until srun has ended

folder=runs/smollm                # where the run saves its checkpoints, as the settings file says
newest() { find "$folder" -path '*/step-*/run.json' 2>/dev/null | sort | tail -n 1; }

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# How long torchrun waits for its ranks to save after SIGTERM. Its default is 30 s, which is too short for large models.
# It has to be less than the seconds of --signal above and, if jobs are preempted, than the partition's GraceTime.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
before=$(newest)

# --kill-on-bad-exit=0: a torchrun that was asked to end has exit code 1, and the other one may still be saving.
# srun does not take --cpus-per-task from the job by itself.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=8 \
    --rdzv_backend=c10d --rdzv_id="$SLURM_JOB_ID" --rdzv_endpoint="$first_node:29500" \
    train.py @examples/pretrain-smollm-135m.args --data corpus/tokens.bin
status=$?

if [ "$status" -ne 0 ] && [ "$(newest)" != "$before" ]; then
    echo "exit code $status, saved $(newest): the job is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
