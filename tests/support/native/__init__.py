"""C++ checks of the kernels, and a pytest plugin that runs the tests against another build of the native module."""
