"""Every rank of a config at its true size without a GPU: what it holds, what it calls, where it waits for the device.

A traced rank is a process of its own. It runs the actor's own code on its CUDA path, from the model to the weight
export, with tensors that have shapes and no numbers (torch's FakeTensorMode) on a device that is not there
(`cuda_stub.c`), in process groups that note each call and send nothing. Tensors on the CPU are real.

What it cannot see:
- numbers: whatever is read from the device is 1, so a branch on such a value is followed one way only;
- kernels: their speed, their workspaces, what they refuse; what torch.compile fuses runs unfused (Dynamo is off);
- PyTorch's caching allocator: rounding and fragmentation;
- other ranks: what is received from them has the shape that this rank expects. Objects gathered from all ranks are this
  rank's own; the pipeline's shape messages hold the shape of a full row; which stage holds which weight is computed;
- NCCL itself: its buffers, its order between communicators, the splitting of groups;
- which rank writes which block of a checkpoint: Megatron checks that itself when it saves;
- weight files: nothing is loaded;
- TransformerEngine's kernels: its own Python builds, saves and communicates, over stand-ins that only make results
  (`te_layers`). Attention is cuDNN's, also where FlashAttention is installed. FP8, context parallelism and
  experts are refused.
"""
