"""`tpi plan`: what a model would take on a machine, and how fast it would be, before anything is loaded."""
