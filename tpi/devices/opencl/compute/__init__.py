"""The kernels of an OpenCL device: `tpi.kernels.Kernels` over the programs in `tpi/devices/opencl/sources`."""
