"""A graphics chip through OpenCL: what laptops have, from Intel, AMD and NVIDIA alike."""
