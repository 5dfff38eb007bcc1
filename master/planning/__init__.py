"""The planning of `tpi plan`: what a model needs on a machine and how fast it would be, before anything is loaded."""
