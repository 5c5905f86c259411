"""What a config needs before a GPU is asked for: memory of every rank, seconds of every phase, GPU-hours of the run.

Read in this order: `shapes` (the model), `state` (parameters, gradients, optimizer: exact), `memory` (what comes on
top, trainer and servers), `lengths` and `rollout` (dynamic sampling over a long tail), `train` (log-probs and updates),
`step` (all phases together), `alternatives` (other splits, and what to change where it does not fit). Constants of the
hardware come from `calibration.yaml`. No torch, no Megatron: it runs on a login node.
"""
