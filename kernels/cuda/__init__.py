"""The decode path's operators on a CUDA device: Triton and Gluon kernels with their launchers, one operator a file."""
