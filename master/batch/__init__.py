"""`tpi batch`: many requests from a file, their answers in another, whatever interrupts it."""
