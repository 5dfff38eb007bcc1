"""Graphics chips through OpenCL, as laptops have them from Intel, AMD and NVIDIA."""
