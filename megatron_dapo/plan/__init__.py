"""What a config needs before a GPU is asked for: memory of every rank, seconds of every phase, GPU-hours of the run.

Read in this order: `scenario` (what a plan depends on), `rank_state` (parameters, gradients, optimizer: exact),
`memory` (what comes on top, trainer and servers), `lengths` and `rollout` (dynamic sampling over a long tail),
`trainer_time` (log-probs and updates), `sync` (new weights), `step_plan` (all phases together), `planner` (whether it
fits, what to change where it does not, other splits). Constants of the hardware come from `calibration.yaml`. No torch,
no Megatron: it runs on a login node.
"""
