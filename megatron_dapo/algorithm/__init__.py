"""DAPO (arXiv 2503.14476) as pure functions on torch tensors: no process, no file, no model.

Read in the order of the paper: `overlong` (eq. 7, 13), `advantage` (eq. 9), `policy_loss` (eq. 8), `aggregation` (its
denominator), `dynamic_sampling` (eq. 11); then what the paper leaves out and others use: `kl`, `importance`.

Shapes, the same in every file: P prompts, G responses a prompt, R responses of a mini-batch, N response tokens of a
mini-batch (flat, response after response), T those of them that one rank holds in one micro-batch, S responses there.
"""
