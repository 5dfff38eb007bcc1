"""The devices that compute inside a node: the host, accelerators through OpenCL or CUDA, and an emulated one."""
