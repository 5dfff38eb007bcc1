"""Links, as the kernel or a process of ours shapes them."""
