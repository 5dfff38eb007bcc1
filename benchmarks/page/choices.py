"""Last part of the page: figures behind design choices, measured once and stored in no result file."""

CHOICES = """## Notes: measurements behind some design choices

These figures were measured on two cores of a server during development. No result file has them; the sections above
have the figures that can be measured again.

- **The wire is bf16 for weights that are not f32.** On the test text it adds 3.5e-5 of KL. q8 adds 3.5e-3, so it is
  not the default.
- **A collective makes one call for each sum and message.** Between two blocks a node's caches are cold, and ten Python
  calls take 20 us instead of 1 us. With more calls a star of four took a quarter to a third longer.
- **libzmq's I/O thread stays on the CPU of the sending thread while sums are short.** Waking an idle core for each turn
  took a fifth of a star's time. As a batch thread on that CPU it made a mesh another fifth faster. But then the data
  that a star's master sends would wait for the computation that follows.
- **Nodes of one machine exchange data through shared memory.** A socket costs ten times as much as a sum.
- **A waiting sum yields the CPU for a millisecond, then sleeps.** Waking a core takes longer than most waits.
- **Sums of a long step are timed alone if a block takes longer than 0.1 s**, so that a start does not take that long.
- **`--verify-weights` is off by default.** With it a start from the cache takes up to a third longer, or three quarters
  longer if the CPU has no SHA instructions.
"""
