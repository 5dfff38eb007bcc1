"""NVIDIA cards: memory, streams and events by torch, kernels by Triton (`tpi.devices.cuda.programs`)."""
