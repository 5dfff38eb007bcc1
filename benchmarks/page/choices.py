"""Last part of the page: figures that decided how TPI is built, measured once and stored in no result file."""

CHOICES = """## Notes: what decided some choices

Measured on the way, on two cores of a server, and kept by no result file; the sections above have
what can be measured again.

- **The wire is bf16 for weights that are not f32**: on the test text it adds 3.5e-5 of KL; q8 adds 3.5e-3 and must be
  asked for.
- **A collective makes one call per sum and message**: a node's caches are cold between two blocks, where ten calls of
  Python take not 1 but 20 us. With more of them a star of four took a quarter to a third as long again.
- **libzmq's I/O thread stays on the CPU of the thread that sends**, while sums are short: waking an idle core for each
  turn took a fifth of a star's time. As a batch thread there it made a mesh a fifth faster still, but what a star's
  master sends would wait for the computing that follows.
- **Nodes of one machine meet in memory**: a socket costs ten times what a sum does.
- **A sum begins with a millisecond of giving way, then sleeps**: waking a core takes longer than most waits.
- **Sums of a long step are timed alone where a block takes longer than 0.1 s**: a start should not wait that long.
- **`--verify-weights` is asked for**: a start from the cache takes up to a third longer with it, three quarters where
  the CPU has no SHA instructions.
"""
